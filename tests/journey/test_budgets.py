"""Money budgets: reserved by estimate, settled by the bill, refused without a fallback until the window ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from accounting.account import Accounts
from accounting.keys import Budget
from accounting.prices import BookVersion, Price, PriceBook, Tariff
from accounting.quotas import Quotas
from gateway.contracts.values import Caller, GenerateRequest, Sampling
from gateway.errors import BudgetExceeded
from gateway.keys.rate_limits import KeyLimiter, month_of
from gateway.keys.shared_limits import SharedLimits
from resilience.failures import BackendFailure, FailureKind
from tests.gateway.test_shared_limits import FakeStore
from tests.journey.rig import CALLER, JourneyRig, RecordingSink
from tests.scripted import Script

Build = Callable[..., JourneyRig]
Ask = Callable[..., GenerateRequest]

DAY = 86_400.0
# 2026-11-30, one hour before the month and the day end.
LATE = datetime(2026, 11, 30, 23, tzinfo=UTC).timestamp()
# A prompt token costs 1,000 nano US dollars, an output token 2,000.
BOOK = PriceBook([BookVersion("v1", 0.0, (Tariff(Price(10**9, 2 * 10**9, 10**9)),))])


class Clock:
    now = LATE

    def __call__(self) -> float:
        return self.now


def spender(**budget: int) -> Caller:
    return replace(CALLER, budget=Budget(**budget))


def priced(rig: JourneyRig, clock: Clock, tenants: dict[str, Budget] | None = None) -> JourneyRig:
    limiter = KeyLimiter(Quotas(clock=clock), unix_time=clock, tenant_budgets=tenants or {})
    accounts = Accounts(rig.outbox, BOOK.priced)
    return replace(rig, journey=replace(rig.journey, limiter=limiter, accounts=accounts))


async def run(rig: JourneyRig, request: GenerateRequest) -> RecordingSink:
    sink = RecordingSink()
    await rig.journey.run(request, sink)
    return sink


async def test_a_request_is_booked_at_its_bill_and_not_at_its_estimate(build_rig: Build, ask: Ask) -> None:
    rig = priced(build_rig(Script(("Hel", "lo"))), Clock())
    caller = spender(nanousd_per_day=10**9)
    sink = await run(rig, ask(caller=caller, sampling=Sampling(max_tokens=500)))
    assert sink.answer is not None
    [row] = rig.outbox.rows
    usage = sink.answer.usage
    assert row.cost_nanousd == 1_000 * usage.input_tokens + 2_000 * usage.output_tokens > 0
    spent = await rig.journey.limiter.spent(caller.key_id, caller.budget)
    assert spent == {"usd_per_day": row.cost_nanousd}


@pytest.mark.parametrize("of_tenant", [False, True])
async def test_a_request_over_its_budget_is_refused_without_fallback_row_or_backend(
    build_rig: Build, ask: Ask, of_tenant: bool
) -> None:
    budget = Budget(nanousd_per_day=500_000)
    tenants = {CALLER.tenant: budget} if of_tenant else None
    caller = CALLER if of_tenant else replace(CALLER, budget=budget)
    rig = priced(build_rig(), Clock(), tenants)
    sink = await run(rig, ask(caller=caller, sampling=Sampling(max_tokens=500)))
    assert sink.error is not None and (sink.error.status, sink.error.code) == (429, "budget_exceeded")
    whose = "the budget of the tenant, for all its keys, is" if of_tenant else "the budget is"
    assert "usd_per_day" in sink.error.message and f"{whose} 0.0005 USD" in sink.error.message
    assert not rig.outbox.rows


async def test_a_request_that_fails_before_its_first_token_costs_nothing(build_rig: Build, ask: Ask) -> None:
    broken = BackendFailure(FailureKind.INVALID_INPUT, "not this one")
    rig = priced(build_rig(Script((), failure=broken)), Clock())
    caller = spender(nanousd_per_month=10**9)
    sink = await run(rig, ask(caller=caller, sampling=Sampling(max_tokens=8), allow_fallback=False))
    assert sink.error is not None
    spent = await rig.journey.limiter.spent(caller.key_id, caller.budget)
    assert spent == {"usd_per_month": 0}


async def refused(limiter: KeyLimiter, caller: Caller, nanousd: int) -> int | None:
    """Returns the milliseconds until a retry that the refusal states."""
    with pytest.raises(BudgetExceeded) as found:
        await limiter.reserve(caller, 0, lambda: nanousd)
    return found.value.retry_after_ms


async def spend(limiter: KeyLimiter, caller: Caller, nanousd: int) -> None:
    held = await limiter.reserve(caller, 0, lambda: nanousd)
    assert held is not None
    held.paid = nanousd
    held.settle(0)


async def test_the_windows_are_the_utc_day_and_month_and_the_refusal_tells_their_end() -> None:
    clock = Clock()
    limiter = KeyLimiter(Quotas(clock=clock), unix_time=clock)
    caller = spender(nanousd_per_day=100, nanousd_per_month=150)
    clock.now = LATE - 10 * DAY
    await spend(limiter, caller, 100)
    assert await refused(limiter, caller, 1) == 3_600_000, "the day ends in an hour"
    clock.now += 3_600.0
    await spend(limiter, caller, 50)
    assert await refused(limiter, caller, 1) == 10 * DAY * 1000, "the month ends in ten days"
    clock.now = LATE + 3_600.0
    await spend(limiter, caller, 100)
    assert await refused(limiter, caller, 151) is None, "it never fits"


async def test_money_that_is_reserved_is_not_given_twice_and_a_refusal_of_the_tenant_frees_the_keys() -> None:
    clock = Clock()
    limiter = KeyLimiter(
        Quotas(clock=clock), unix_time=clock, tenant_budgets={CALLER.tenant: Budget(nanousd_per_day=120)}
    )
    caller, other = spender(nanousd_per_day=100), replace(spender(nanousd_per_day=100), key_id="key_other")
    held = await limiter.reserve(caller, 0, lambda: 80)
    assert held is not None
    assert await refused(limiter, caller, 30) == 1_000, "it may be given back at any moment"
    assert await refused(limiter, other, 60) == 1_000, "the tenant's"
    assert await limiter.spent(other.key_id, other.budget) == {"usd_per_day": 0}
    held.paid = 20
    held.settle(0)
    held.settle(0)
    await spend(limiter, other, 60)
    assert await limiter.spent(caller.key_id, caller.budget) == {"usd_per_day": 20}


async def test_gateways_share_budgets_and_one_that_starts_again_knows_what_was_spent() -> None:
    clock = Clock()
    store = FakeStore(clock)  # type: ignore[arg-type]

    def started(name: str) -> tuple[KeyLimiter, SharedLimits]:
        shared = SharedLimits(
            store, clock=clock, unix_time=clock, emit=lambda event: None, new_holder=lambda: name
        )
        return KeyLimiter(Quotas(clock=clock), shared, unix_time=clock), shared

    caller = spender(nanousd_per_month=100)
    (one, shared), (other, _) = started("one"), started("other")
    await spend(one, caller, 70)
    await shared.close()
    assert await refused(other, caller, 40) == 3_600_000
    again, _ = started("again")
    assert await again.spent(caller.key_id, caller.budget) == {"usd_per_month": 70}
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("at", "month", "end"),
    [("2026-12-31T23:59:59", "2026-12", "2027-01-01"), ("2028-02-01T00:00:00", "2028-02", "2028-03-01")],
)
def test_a_month_ends_where_the_next_begins(at: str, month: str, end: str) -> None:
    now, then = (
        datetime.fromisoformat(f"{one}+00:00" if "T" in one else f"{one}T00:00:00+00:00") for one in (at, end)
    )
    assert month_of(now.timestamp()) == (month, then.timestamp())
