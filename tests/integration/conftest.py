"""One gateway for all tests that only read or ask; those that kill or starve it start their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.live import LiveGateway, gateway


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveGateway]:
    with gateway(tmp_path_factory.mktemp("live")) as running:
        yield running
