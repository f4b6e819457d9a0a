"""Tokens of a limited key: reserved before the request, settled by its use, refused without a fallback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from accounting.keys import NO_BUDGET, Budget, KeyLimits, ModelLimits
from accounting.quotas import Quotas
from gateway.contracts.values import Caller, Contract, GenerateRequest, Sampling
from gateway.errors import BudgetExceeded, RateLimited
from gateway.keys.rate_limits import KeyLimiter
from resilience.failures import BackendFailure, FailureKind
from tests.journey.rig import CALLER, JourneyRig, RecordingSink
from tests.scripted import Script, ScriptedBackend

Build = Callable[..., JourneyRig]
Ask = Callable[..., GenerateRequest]
BOTH = {"backends": [{"name": "local"}, {"name": "spare", "weight": 0}]}


def limited(**limits: int) -> Caller:
    return replace(CALLER, limits=KeyLimits(**limits))


async def remaining(rig: JourneyRig, caller: Caller) -> int:
    headers = dict(await rig.journey.limiter.headers(caller))
    return int(headers[b"x-ratelimit-remaining-tokens"])


async def test_a_request_is_charged_what_it_used_and_not_what_it_reserved(build_rig: Build, ask: Ask) -> None:
    rig, sink = build_rig(Script(("Hel", "lo"))), RecordingSink()
    caller = limited(tokens_per_minute=1_000)
    await rig.journey.run(ask(caller=caller, sampling=Sampling(max_tokens=500)), sink)
    assert sink.answer is not None
    used = sink.answer.usage.input_tokens + sink.answer.usage.output_tokens
    assert 0 < used < 100 and await remaining(rig, caller) == 1_000 - used


async def test_a_request_over_a_limit_is_429_without_fallback_or_row(build_rig: Build, ask: Ask) -> None:
    rig = build_rig()
    for limits, code in (
        ({"tokens_per_minute": 100}, "rate_limited"),
        ({"tokens_per_day": 100}, "quota_exceeded"),
    ):
        sink = RecordingSink()
        request = ask(caller=limited(**limits), sampling=Sampling(max_tokens=500))
        await rig.journey.run(request, sink)
        assert sink.error is not None and (sink.error.status, sink.error.code) == (429, code)
        assert sink.error.retry_after_ms is None, "it will never fit"
        assert not rig.outbox.rows and await remaining(rig, request.caller) == 100


async def test_a_second_request_waits_for_the_minute_of_the_first(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(Script(), Script())
    caller = limited(tokens_per_minute=100)
    first, second = RecordingSink(), RecordingSink()
    await rig.journey.run(ask(caller=caller, sampling=Sampling(max_tokens=8)), first)
    assert first.answer is not None
    left = await remaining(rig, caller)
    await rig.journey.run(ask(caller=caller, sampling=Sampling(max_tokens=left)), second)
    assert second.error is not None and second.error.code == "rate_limited"
    assert second.error.retry_after_ms is not None and 0 < second.error.retry_after_ms <= 61_000


async def test_a_request_that_fails_before_its_first_token_costs_nothing(build_rig: Build, ask: Ask) -> None:
    broken = BackendFailure(FailureKind.INVALID_INPUT, "not this one")
    rig = build_rig(Script((), failure=broken))
    sink, caller = RecordingSink(), limited(tokens_per_minute=1_000)
    request = ask(caller=caller, sampling=Sampling(max_tokens=8), allow_fallback=False)
    await rig.journey.run(request, sink)
    assert sink.error is not None and await remaining(rig, caller) == 1_000


def per_model(model: str, budget: Budget = NO_BUDGET, **limits: int) -> Caller:
    return replace(CALLER, model_limits=(ModelLimits(model, KeyLimits(**limits), budget),))


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({"requests_per_minute": 1}, "rate_limited"),
        ({"tokens_per_minute": 60}, "rate_limited"),
        ({"tokens_per_day": 60}, "quota_exceeded"),
    ],
)
async def test_a_limit_for_a_model_holds_for_that_model_alone(
    build_rig: Build, ask: Ask, limits: dict[str, int], code: str
) -> None:
    both = [ScriptedBackend("local", model="large"), ScriptedBackend("spare", model="small")]
    rig, caller = build_rig(backends=both, route=BOTH), per_model("small", **limits)

    async def sent(model: str) -> RecordingSink:
        sink = RecordingSink()
        request = ask(caller=caller, model=model, contract=Contract.CHAT, sampling=Sampling(max_tokens=20))
        await rig.journey.run(request, sink)
        return sink

    assert (await sent("small")).answer is not None
    errors = [one.error for one in [await sent("small") for _ in range(20)] if one.error is not None]
    assert {(error.status, error.code) for error in errors} == {(429, code)}
    assert f"{next(iter(limits))}: " in errors[0].message and "limit for small is" in errors[0].message
    assert errors[0].retry_after_ms is not None
    assert (await sent("large")).answer is not None and (await sent("large")).answer is not None
    [limit] = [one.limits for one in caller.model_limits]
    used = await rig.journey.limiter.used(caller.key_id, limit, "small")
    assert list(used) == list(limits) and 0 < used[next(iter(limits))] <= 60


async def test_a_budget_for_a_model_and_a_refusal_leave_nothing_held() -> None:
    limiter = KeyLimiter(Quotas(clock=lambda: 0.0), unix_time=lambda: 0.0)
    limits = KeyLimits(tokens_per_minute=100)
    own = (ModelLimits("small", KeyLimits(), Budget(nanousd_per_day=500)),)
    caller = replace(CALLER, limits=limits, model_limits=own)
    for model in ("small", "large", None):
        held = await limiter.reserve(caller, 10, lambda: 400, model)
        assert held is not None
        held.paid = 400
        held.settle(10)
    with pytest.raises(BudgetExceeded, match="the budget for small is 5e-07 USD"):
        await limiter.reserve(caller, 10, lambda: 400, "small")
    assert await limiter.used(caller.key_id, limits) == {"tokens_per_minute": 30}
    assert await limiter.spent(caller.key_id, own[0].budget, "small") == {"usd_per_day": 400}


async def test_a_refusal_shows_the_whole_id_of_a_model_whatever_its_words() -> None:
    limiter = KeyLimiter(Quotas(clock=lambda: 0.0), unix_time=lambda: 0.0)
    of_model = "the model small"
    own = ModelLimits(of_model, KeyLimits(requests_per_minute=1), Budget(nanousd_per_day=500))
    caller = replace(CALLER, model_limits=(own,))
    with pytest.raises(BudgetExceeded, match=f"the budget for {of_model} is 5e-07 USD"):
        await limiter.reserve(caller, 10, lambda: 501, of_model)
    with pytest.raises(RateLimited, match=f"the key's limit for {of_model} is 1;"):
        await limiter.reserve(caller, 10, lambda: 1, of_model)
