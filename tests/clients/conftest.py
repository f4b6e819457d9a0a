"""Fixtures: a gateway process in front of a scripted worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml

from tests.clients.shop_worker import serving_shop
from tests.integration.live import LiveGateway, gateway


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveGateway]:
    folder = tmp_path_factory.mktemp("clients")
    with serving_shop() as url:
        (folder / "routing.yaml").write_text(
            yaml.safe_dump(
                {"routes": {"self_hosted_generation": {"backends": [{"name": "worker", "weight": 100}]}}}
            )
        )
        (folder / "sluice.yaml").write_text(
            yaml.safe_dump(
                {
                    "engine": {"kind": "none"},
                    "backends": {"worker": {"kind": "openai", "base_urls": [f"{url}/v1"]}},
                    "routing": {"file": str(folder / "routing.yaml")},
                }
            )
        )
        with gateway(folder, config=folder / "sluice.yaml") as running:
            yield running
