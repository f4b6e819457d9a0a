"""One gateway for all tests that only read or ask; those that kill or starve it start their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.live import LiveGateway, gateway


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveGateway]:
    # A request waits for the check of its grammar on a busy machine, too.
    with gateway(tmp_path_factory.mktemp("live"), SLUICE_ADMISSION__MAX_WAIT_MS="60000") as running:
        yield running
