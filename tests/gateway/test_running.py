"""A gateway that cannot start says why, and what runs beside the requests ends in order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from engine.errors import EngineStartError
from gateway.backends.port import BackendState
from gateway.config.engine import BUNDLED
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


class KilledEngine:
    """An engine's host whose process ends while it starts, by the signal that drains the gateway."""

    state = BackendState.STARTING
    facts = None
    starting = contextlib.nullcontext()

    def __init__(self, drain: Callable[[], None]) -> None:
        self.drain = drain

    async def start(self) -> None:
        self.drain()
        raise EngineStartError("the process ended")

    async def stop(self, timeout_s: float) -> None:
        """Nothing runs."""


async def test_an_engine_that_ends_by_the_signal_that_ends_the_gateway_is_no_failed_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings.model_validate(
        {"engine": {"model": str(BUNDLED / "demo")}, "state": {"url": "memory://"}}
    )
    gateway = build(settings, admin_key="k" * 32)
    core, drain = gateway.core, gateway.serving.in_flight.drain
    (engine,) = core.backends.engines.in_process
    killed = replace(engine, host=cast("Any", KilledEngine(drain)))
    engines = replace(core.backends.engines, in_process=(killed,))
    gateway = replace(gateway, core=replace(core, backends=replace(core.backends, engines=engines)))
    async with gateway.running():
        await asyncio.sleep(0.05)
    assert gateway.serving.in_flight.draining


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
