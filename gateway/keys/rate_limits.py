"""Applies keys' limits to requests: over a limit the caller gets 429, never a fallback answer."""

import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime

from msgspec import Struct

from accounting.events import QuotaDecided, QuotaEvent, QuotaSettled
from accounting.keys import NO_BUDGET, NO_LIMITS, Budget, KeyLimits, ModelLimits
from accounting.quotas import (
    BUDGETS,
    LIMITS,
    MINUTE_S,
    RETRY_HELD_S,
    Excess,
    Figures,
    HoldId,
    QuotaRequest,
    Quotas,
    Settlement,
    kinds_of,
)
from accounting.values import UsageRow
from gateway.contracts.values import Caller
from gateway.errors import BudgetExceeded, QuotaExceeded, RateLimited
from gateway.generation.answer_stream import AnswerStream
from gateway.keys.ceilings import NANOUSD, NO_CEILINGS, Ceilings
from gateway.keys.shared_limits import SharedLimits

Header = tuple[bytes, bytes]
_DAY = "tokens_per_day"
_LOCAL = "local"


def duration(seconds: float) -> str:
    """Format a duration like OpenAI (``6m0s``), in whole seconds, rounded up."""
    minutes, second = divmod(math.ceil(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}h{minute}m{second}s" if hour else f"{minute}m{second}s" if minute else f"{second}s"


def month_of(unix_s: float) -> tuple[str, float]:
    """Return the UTC month as ``2026-11``, and its end in Unix seconds."""
    now = datetime.fromtimestamp(unix_s, UTC)
    end = datetime(now.year + now.month // 12, now.month % 12 + 1, 1, tzinfo=UTC)
    return f"{now:%Y-%m}", end.timestamp()


def budget_of(usd_per_day: float | None, usd_per_month: float | None) -> Budget:
    """Make a budget in whole nano US dollars."""
    day, month = (None if usd is None else round(usd * NANOUSD) for usd in (usd_per_day, usd_per_month))
    return Budget(day, month)


class TokenReservation(Struct, eq=False):
    """Tokens and money reserved for a request, counted as used until it is settled."""

    tokens: int
    # What the tenant pays, in nano US dollars; set when the request is billed.
    paid: int = 0
    _settle_tokens: list[Callable[[int], None]] = []
    _settle_money: list[Callable[[int], None]] = []

    def settle(self, used: int) -> None:
        """Replace the reservation by the used tokens and money; a second call changes nothing."""
        for settle in self._settle_tokens:
            settle(used)
        for settle in self._settle_money:
            settle(self.paid)
        self._settle_tokens, self._settle_money = [], []


@dataclass(eq=False)
class KeyLimiter:
    """Counts keys' requests, and reserves tokens and money for requests.

    A key without limits is not counted in the store; ``ceilings`` apply to it in this process. ``running``
    returns the context manager in which a request of a key runs.

    Args:
        quotas: this process's own counts.
        shared: the counts of all processes; ``None``: this is the only process. While their store cannot be
            reached, this process decides by its last answer and by its own counts, which it always updates.
        tenant_budgets: budgets of tenants, in addition to those of their keys.
        unix_time: selects the day and the month of a budget.
    """

    quotas: Quotas = field(default_factory=lambda: Quotas(clock=time.monotonic))
    shared: SharedLimits | None = None
    _: KW_ONLY
    tenant_budgets: Mapping[str, Budget] = field(default_factory=dict)
    unix_time: Callable[[], float] = time.time
    emit: Callable[[QuotaEvent], None] = lambda event: None
    ceilings: Ceilings = NO_CEILINGS

    def __post_init__(self) -> None:
        self.running = self.ceilings.running
        self._spent = Quotas(clock=self.unix_time)
        self._numbers = itertools.count(1)

    async def enter(self, caller: Caller) -> None:
        """Count a request. Raises RateLimited."""
        self.ceilings.count_request(caller)
        if caller.limits.requests_per_minute is not None:
            await self._count(caller.key_id, caller.limits)

    async def _count(self, account: str, limits: KeyLimits, place: str = "") -> None:
        if limits.requests_per_minute is None:
            return
        ask = QuotaRequest(requests=1)
        verdict = None if self.shared is None else await self.shared.count(account, limits)
        if verdict is None:
            self._decide("request", account, limits, ask, place)
            return
        if verdict.excess is None:
            # Counted here too, in case the shared counts become unreachable.
            self.quotas.count(account, limits, ask)
        self._decided("request", verdict.excess, place, shared=True)

    async def headers(self, caller: Caller) -> list[Header]:
        """Return the ``x-ratelimit-*`` headers of a key with limits."""
        if caller.limits == NO_LIMITS:
            return []
        figures = _tightest(await self._figures(caller.key_id, caller.limits))
        return [
            (f"x-ratelimit-{word}-{name}".encode(), str(value).encode())
            for name, one in figures.items()
            for word, value in (
                ("limit", one.limit),
                ("remaining", one.remaining),
                ("reset", duration(one.reset_s)),
            )
        ]

    async def used(self, key_id: str, limits: KeyLimits, model: str | None = None) -> dict[str, int]:
        """Return what is now used or reserved of a key's limits, or of those for a model, by limit name."""
        return await self._used(_of_model(key_id, model), limits)

    async def _used(self, account: str, limits: KeyLimits | Budget) -> dict[str, int]:
        if limits in (NO_LIMITS, NO_BUDGET):
            return {}
        figures = await self._figures(account, limits)
        return {
            kind.name: one.limit - one.remaining
            for kind, one in zip(kinds_of(limits), figures, strict=True)
            if one is not None
        }

    async def spend(self, caller: Caller, tokens: int) -> None:
        """Count tokens as used. Raises the errors of :meth:`reserve`."""
        reservation = await self.reserve(caller, tokens) if tokens else None
        if reservation is not None:
            reservation.settle(tokens)

    async def reserve(
        self, caller: Caller, tokens: int, cost: Callable[[], int] = int, model: str | None = None
    ) -> TokenReservation | None:
        """Reserve the most that a request may use; ``None`` for a key without such limits.

        ``cost`` returns what the request may cost, in nano US dollars. If the key has limits for ``model``,
        the request is also counted there.

        Raises:
            RateLimited: over the tokens per minute, or the requests per minute of the model.
            QuotaExceeded: over the tokens per day.
            BudgetExceeded: over the budget of a day or a month, of the key or its tenant.
        """
        self.ceilings.count_use(caller, tokens, cost)
        limits, own = caller.limits, None
        if caller.model_limits:
            own = next((one for one in caller.model_limits if one.model == model), None)
        accounts = [(caller.key_id, limits, "")]
        if own is not None:
            accounts.append((_of_model(caller.key_id, model), own.limits, f" for {model}"))
            await self._count(*accounts[1])
        of_tenant = self.tenant_budgets.get(caller.tenant, NO_BUDGET)
        tokens_are_free = limits.tokens_per_minute is limits.tokens_per_day is None
        if own is None and tokens_are_free and of_tenant is caller.budget is NO_BUDGET:
            return None
        budgets = self._budgets(caller, of_tenant, own)
        reservation = TokenReservation(tokens)
        try:
            for account, limits, place in accounts:
                if limits.tokens_per_minute is not None or limits.tokens_per_day is not None:
                    held = await self._hold("tokens", account, limits, tokens, place)
                    reservation._settle_tokens.append(held)
            nanousd = cost() if budgets else 0
            for account, budget, place in budgets:
                held = await self._hold("money", account, budget, nanousd, place)
                reservation._settle_money.append(held)
        except BaseException:
            reservation.settle(0)
            raise
        return reservation if reservation._settle_tokens or budgets else None

    async def spent(self, key_id: str, budget: Budget, model: str | None = None) -> dict[str, int]:
        """Return what a key has spent or reserved of its budget, or of that for a model, in nano US dollars,
        by budget name.
        """
        return await self._used(self._account("key", _of_model(key_id, model)), budget)

    def _budgets(
        self, caller: Caller, of_tenant: Budget, own: ModelLimits | None
    ) -> list[tuple[str, Budget, str]]:
        """Return the accounts with a budget, and how an error calls the account."""
        budgets = [
            ("key", caller.key_id, caller.budget, ""),
            ("tenant", caller.tenant, of_tenant, " of the tenant, for all its keys,"),
        ]
        if own is not None:
            budgets.append(("key", _of_model(caller.key_id, own.model), own.budget, f" for {own.model}"))
        return [
            (self._account(kind, name), one, place) for kind, name, one, place in budgets if one != NO_BUDGET
        ]

    def _account(self, kind: str, name: str) -> str:
        """Return the name of a month's account. No key's id contains a space."""
        return f"usd {kind} {name} {month_of(self.unix_time())[0]}"

    def _counts(self, limits: KeyLimits | Budget) -> Quotas:
        return self._spent if isinstance(limits, Budget) else self.quotas

    async def _hold(
        self, kind: str, account: str, limits: KeyLimits | Budget, amount: int, place: str
    ) -> Callable[[int], None]:
        """Hold an amount; return the function that replaces it by the used one."""
        verdict, hold = None, None
        if self.shared is not None:
            verdict, hold = await self.shared.hold(account, limits, amount)
        own = hold or HoldId(_LOCAL, next(self._numbers))
        ask = QuotaRequest(tokens=amount, hold=own)
        if verdict is None:
            self._decide(kind, account, limits, ask, place)
        else:
            self._decided(kind, verdict.excess, place, shared=True)
            self._counts(limits).count(account, limits, ask)

        def settle(used: int) -> None:
            self._counts(limits).settle(Settlement(account, limits, own, None, used))
            if self.shared is not None:
                self.shared.settle(account, limits, hold, verdict, amount, used)
            if kind == "tokens":
                self.emit(QuotaSettled(amount, used))

        return settle

    def _decide(
        self, kind: str, key_id: str, limits: KeyLimits | Budget, ask: QuotaRequest, place: str
    ) -> None:
        """Decide without the store: by its last answer, and by this process's own counts."""
        excess = None if self.shared is None else self.shared.last_known(key_id, limits, ask)
        if excess is None:
            excess = self._counts(limits).take(key_id, limits, ask).excess
        self._decided(kind, excess, place, shared=False)
        if self.shared is not None:
            self.shared.count_passed(key_id, ask)

    async def _figures(self, key_id: str, limits: KeyLimits | Budget) -> tuple[Figures | None, ...]:
        if self.shared is not None:
            figures = await self.shared.figures(key_id, limits)
            if figures is not None:
                return figures
        return self._counts(limits).take(key_id, limits, QuotaRequest()).figures

    def _decided(self, kind: str, excess: Excess | None, place: str, *, shared: bool) -> None:
        self.emit(QuotaDecided(kind, None if excess is None else excess.name, shared))
        if excess is None:
            return
        raise self._over_budget(excess, place) if kind == "money" else _refusal(excess, place)

    def _over_budget(self, excess: Excess, place: str) -> BudgetExceeded:
        wait_s = excess.wait_s
        if wait_s is not None and wait_s > RETRY_HELD_S and excess.name == BUDGETS[2].name:
            now = self.unix_time()
            wait_s = month_of(now)[1] - now
        asked, limit = (f"{one / NANOUSD:g} USD" for one in (excess.asked, excess.limit))
        hint, retry_after_ms = _hint(wait_s)
        return BudgetExceeded(
            f"{excess.name}: the request may cost {asked}, the budget{place} is {limit}; {hint}",
            retry_after_ms=retry_after_ms,
        )


class Settling(Struct, eq=False):
    """Settles the reservation when the block ends.

    If the block did not call ``settle``, the request has used its prompt and the generated tokens, or nothing
    if no token was generated.
    """

    _held: TokenReservation | None
    _stream: AnswerStream

    def __enter__(self) -> TokenReservation | None:
        return self._held

    def __exit__(self, *_: object) -> None:
        if self._held is not None:
            tokens, origin = self._stream.tokens, self._stream.origin
            self._held.settle(origin.plan.counts.total + tokens if tokens and origin else 0)


def paying(held: TokenReservation | None, billed: Callable[[UsageRow], None]) -> Callable[[UsageRow], None]:
    """Wrap ``billed`` to set the reservation's ``paid``: the billed cost, 0 for an undelivered answer."""
    if held is None:
        return billed

    def pay(row: UsageRow) -> None:
        held.paid = row.cost_nanousd if row.billable_input_tokens or row.billable_output_tokens else 0
        billed(row)

    return pay


def _tightest(figures: tuple[Figures | None, ...]) -> Mapping[str, Figures]:
    """Return the figures of ``requests`` and ``tokens``; of two token limits, those with less remaining."""
    found: dict[str, Figures] = {}
    for kind, one in zip(LIMITS, figures, strict=True):
        name = "tokens" if kind.of_tokens else "requests"
        if one is not None and (name not in found or one.remaining < found[name].remaining):
            found[name] = one
    return found


def _of_model(key_id: str, model: str | None) -> str:
    """Return the account of a key's limits for a model. No key's id contains a space."""
    return key_id if model is None else f"{key_id} model {model}"


def _refusal(excess: Excess, place: str) -> RateLimited | QuotaExceeded:
    wait_s, is_daily = excess.wait_s, excess.name == _DAY
    if wait_s is not None and not is_daily:
        # A window's last step takes up to 61 s. Claude Code and older clients of OpenAI and Anthropic do not
        # wait for more than 60 s; what is then left is at most another second.
        wait_s = min(wait_s, MINUTE_S)
    hint, retry_after_ms = _hint(wait_s)
    message = (
        f"{excess.name}: the request needs {excess.asked}, the key's limit{place} is {excess.limit}; {hint}"
    )
    error = QuotaExceeded if is_daily else RateLimited
    return error(message, retry_after_ms=retry_after_ms)


def _hint(wait_s: float | None) -> tuple[str, int | None]:
    """Return a hint for the caller, and the milliseconds until a retry."""
    if wait_s is None:
        return "ask for less", None
    return f"too little is left now; try again in {math.ceil(wait_s)} s", max(1, math.ceil(wait_s * 1000))
