"""Which tenants share prefixes in the embedded engine."""

from __future__ import annotations

import pytest

from engine.errors import EngineBusy
from engine.values import GenerationRequest
from gateway.backends.embedded import EmbeddedBackend
from gateway.backends.embedded_vectors import ids_alone
from gateway.backends.lora_slots import LoraSlots
from gateway.backends.port import Work
from gateway.config.settings import load_settings
from gateway.contracts.events import Delta
from gateway.contracts.values import Sampling
from gateway.wiring.engine import engine_config
from resilience.failures import BackendFailure


class RefusingClient:
    """A client of an engine that is always full; ``asked`` records the requests."""

    def __init__(self) -> None:
        self.asked: list[GenerationRequest] = []

    def submit(self, request: GenerationRequest) -> None:
        self.asked.append(request)
        raise EngineBusy("full")


async def take(delta: Delta) -> None:
    raise AssertionError(f"nothing runs, yet there came {delta}")


@pytest.mark.parametrize(("share", "salt"), [(False, "acme"), (True, None)])
async def test_a_tenant_has_its_own_prefixes_unless_tenants_share_them(share: bool, salt: str | None) -> None:
    client = RefusingClient()
    backend = EmbeddedBackend(
        name="local",
        model="demo",
        client=client,  # type: ignore[arg-type]
        defaults=Sampling(),
        max_running=1,
        token_bytes=lambda token_id: b"",
        adapters=LoraSlots(client, 0),  # type: ignore[arg-type]
        encode=ids_alone,
        share_prefixes=share,
    )
    with pytest.raises(BackendFailure):
        await backend.generate(Work("1", (5, 6), (), Sampling(max_tokens=1), cache_salt="acme"), take)
    assert [request.cache_salt for request in client.asked] == [salt]


def test_prefix_caching_is_on_unless_the_file_or_vllms_variable_turns_it_off() -> None:
    settings = [load_settings(None, environ).engine for environ in ({}, {"ENABLE_PREFIX_CACHING": "false"})]
    assert [engine_config(one).enable_prefix_caching for one in settings] == [True, False]
