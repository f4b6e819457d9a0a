"""Tokens of a limited key: reserved before anything is spent, settled by what was, refused without a fallback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from accounting.keys import KeyLimits
from gateway.backends.scripted import Script
from gateway.contracts.values import Caller, GenerateRequest, Sampling
from resilience.failures import BackendFailure, FailureKind
from tests.journey.house import CALLER, House, RecordingSink

Build = Callable[..., House]
Ask = Callable[..., GenerateRequest]


def limited(**limits: int) -> Caller:
    return replace(CALLER, limits=KeyLimits(**limits))


async def remaining(house: House, caller: Caller) -> int:
    headers = dict(await house.journey.limiter.headers(caller))
    return int(headers[b"x-ratelimit-remaining-tokens"])


async def test_a_request_is_charged_what_it_used_and_not_what_it_reserved(
    build_house: Build, ask: Ask
) -> None:
    house, sink = build_house(Script(("Hel", "lo"))), RecordingSink()
    caller = limited(tokens_per_minute=1_000)
    await house.journey.run(ask(caller=caller, sampling=Sampling(max_tokens=500)), sink)
    assert sink.answer is not None
    used = sink.answer.usage.input_tokens + sink.answer.usage.output_tokens
    assert 0 < used < 100 and await remaining(house, caller) == 1_000 - used


async def test_what_does_not_fit_is_429_without_fallback_row_or_backend(build_house: Build, ask: Ask) -> None:
    house = build_house()
    for limits, code in (
        ({"tokens_per_minute": 100}, "rate_limited"),
        ({"tokens_per_day": 100}, "quota_exceeded"),
    ):
        sink = RecordingSink()
        request = ask(caller=limited(**limits), sampling=Sampling(max_tokens=500))
        await house.journey.run(request, sink)
        assert sink.error is not None and (sink.error.status, sink.error.code) == (429, code)
        assert sink.error.retry_after_ms is None, "it will never fit"
        assert not house.outbox.rows and await remaining(house, request.caller) == 100


async def test_a_second_request_waits_for_the_minute_of_the_first(build_house: Build, ask: Ask) -> None:
    house = build_house(Script(), Script())
    caller = limited(tokens_per_minute=100)
    first, second = RecordingSink(), RecordingSink()
    await house.journey.run(ask(caller=caller, sampling=Sampling(max_tokens=8)), first)
    assert first.answer is not None
    left = await remaining(house, caller)
    await house.journey.run(ask(caller=caller, sampling=Sampling(max_tokens=left)), second)
    assert second.error is not None and second.error.code == "rate_limited"
    assert second.error.retry_after_ms is not None and 0 < second.error.retry_after_ms <= 61_000


async def test_a_request_that_fails_before_its_first_token_costs_nothing(
    build_house: Build, ask: Ask
) -> None:
    broken = BackendFailure(FailureKind.INVALID_INPUT, "not this one")
    house = build_house(Script((), failure=broken))
    sink, caller = RecordingSink(), limited(tokens_per_minute=1_000)
    request = ask(caller=caller, sampling=Sampling(max_tokens=8), allow_fallback=False)
    await house.journey.run(request, sink)
    assert sink.error is not None and await remaining(house, caller) == 1_000
