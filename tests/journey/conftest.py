"""Fixtures: functions that build a JourneyRig and a request."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from msgspec.structs import replace

from budgeting.counting import ChatTokenizer
from budgeting.values import Message, Role
from gateway.contracts.values import Contract, GenerateRequest
from tests.journey import rig
from tests.journey.rig import CALLER, JourneyRig
from tests.virtual_time import loop_time


@pytest.fixture(scope="session")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(rig.ROOT / "models" / "demo")


@pytest.fixture
def build_rig(tokenizer: ChatTokenizer) -> Callable[..., JourneyRig]:
    return partial(rig.build_rig, tokenizer)


@pytest.fixture
def ask() -> Callable[..., GenerateRequest]:
    def make(text: str = "Recommend something like Vinland Saga", **changes: object) -> GenerateRequest:
        request = GenerateRequest(
            request_id="req_1",
            generation_id="gen_1",
            contract=Contract.NATIVE,
            caller=CALLER,
            arrived_at=loop_time(),
            created=1_700_000_000,
            messages=(Message(Role.USER, text),),
        )
        return replace(request, **changes)  # type: ignore[arg-type]

    return make
