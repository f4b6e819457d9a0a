"""A gateway that cannot start says why, and what runs beside the requests ends in order."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from engine.errors import EngineStartError
from gateway.config.errors import ConfigError
from gateway.config.settings import Settings
from gateway.wiring.build import build


class NoEngine:
    """Fails as an engine does that cannot start."""

    async def run(self) -> None:
        await asyncio.sleep(0.01)
        raise EngineStartError("no such device")


@dataclass
class ClosingConnection:
    """Takes a moment to close, as a connection to a database does."""

    closed: bool = False

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.02)
            self.closed = True


async def test_an_engine_that_does_not_start_lets_connections_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # away from the repository's routing.yaml
    settings = Settings.model_validate(
        {
            "auth": {"enabled": False},
            "engine": {"kind": "none"},
            "backends": {"pool": {"kind": "openai", "base_urls": ["http://127.0.0.1:9/v1"], "model": "base"}},
            "state": {"url": "memory://"},
            "ledger": {"url": f"sqlite+aiosqlite:///{tmp_path}/l.db"},
        }
    )
    gateway, connection = build(settings, admin_key=None), ClosingConnection()
    residents = cast("dict[str, Any]", gateway.core.backends.engines.residents)
    residents |= {"engine": NoEngine(), "connection": connection}
    with pytest.raises(ExceptionGroup) as caught:
        async with gateway.running():
            await asyncio.Event().wait()
    assert caught.value.subgroup(EngineStartError) is not None
    assert connection.closed


def test_a_folder_for_the_state_that_cannot_be_made_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "state").write_text("no folder")
    pool = {"kind": "openai", "base_urls": ["http://127.0.0.1:9/v1"], "model": "base"}
    settings = Settings.model_validate({"engine": {"kind": "none"}, "backends": {"pool": pool}})
    with pytest.raises(
        ConfigError, match=rf"state\.url, ledger\.url: the folder {tmp_path}/state cannot be made"
    ):
        build(settings, admin_key="k" * 32)
