from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer

from tests.replay.fake_gateway import FakeGateway


@pytest.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    """A fake gateway that listens; set its ``behave`` before replaying."""
    fake = FakeGateway()
    server = TestServer(fake.app())
    await server.start_server()
    fake.url = str(server.make_url("")).rstrip("/")
    yield fake
    await server.close()


@pytest.fixture
def azure(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes a trace in Azure's form from ``(seconds, prompt, answer)`` rows."""

    def write(*rows: tuple[float, int, int]) -> Path:
        lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
        lines += [f"2023-11-16 18:15:{at:010.7f},{prompt},{answer}" for at, prompt, answer in rows]
        path = tmp_path / "trace.csv"
        path.write_text("\r\n".join(lines) + "\r\n")
        return path

    return write
