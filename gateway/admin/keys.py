"""Keys for admins: list, create, change, revoke; each change is audited."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import orjson
from pydantic import AwareDatetime, Field
from typing_extensions import TypedDict

from accounting.keys import (
    HIGHEST_PRIORITY,
    Budget,
    CallerRole,
    KeyLimits,
    KeyRecord,
    KeyRing,
    ModelLimits,
    StoredKey,
    draw_key,
)
from accounting.quotas import BUDGETS, amounts
from gateway.contracts.fields import Body, Priority, from_attributes
from gateway.contracts.front_headers import WORD
from gateway.contracts.refusals import not_allowed, parse
from gateway.contracts.times import iso_time
from gateway.errors import InvalidRequest
from gateway.keys.ceilings import NANOUSD
from gateway.keys.last_used import KeyUse
from gateway.keys.rate_limits import KeyLimiter, budget_of
from gateway.keys.registry import KeyProjection
from gateway.state.audit import Audit

# The first and the last second that ISO 8601 can represent, 0001-01-01T00:00:00Z and 9999-12-31T23:59:59Z:
# every key that is created can be shown.
EARLIEST = -62_135_596_800.0
LATEST = 253_402_300_799.0

_Limit = Annotated[int, Field(ge=1, le=10**15)]
# At least a thousandth of a cent, so that it is a whole number of nano US dollars.
_Usd = Annotated[float, Field(ge=0.00001, le=1_000_000)]
_Word = Annotated[str, Field(pattern=WORD)]
_Name = Annotated[str, Field(min_length=1, max_length=256)]
# An empty list would allow nothing; a missing field allows all.
_Names = Annotated[tuple[_Name, ...], Field(strict=False, min_length=1, max_length=256)]


class KeyLimitsBody(Body):
    """The requests and tokens that the key may use; ``None`` is no limit."""

    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    tokens_per_day: _Limit | None = None


class BudgetBody(Body):
    """How much the key may spend, in US dollars per UTC day and month; ``None`` is no limit."""

    usd_per_day: _Usd | None = None
    usd_per_month: _Usd | None = None


class ModelLimitsBody(KeyLimitsBody, BudgetBody):
    """The limits and the budget of the key for one model."""


class KeyChangeBody(Body):
    """New values of a key's fields. Those that are not given stay, also within ``limits`` and ``budget``."""

    # Unset: 0, as high priority must be granted; a front gets the highest, since it caps its callers itself.
    max_priority: Priority | None = None
    routes: _Names | None = None
    adapters: _Names | None = None
    tools: bool = True
    models: _Names | None = None
    aliases: Annotated[dict[_Name, _Name], Field(max_length=256)] = Field(default={})
    limits: KeyLimitsBody = KeyLimitsBody()
    budget: BudgetBody = BudgetBody()
    model_limits: Annotated[dict[_Name, ModelLimitsBody], Field(max_length=256)] = Field(default={})
    # A time as text, or seconds since 1970.
    expires_at: Annotated[AwareDatetime, Field(strict=False)] | None = None
    comment: Annotated[str, Field(max_length=1_000)] = ""


class KeyBody(KeyChangeBody):
    """A new key."""

    tenant: _Word
    org: _Word | None = None
    role: CallerRole = CallerRole.CALLER


class KeyShown(TypedDict):
    """A key, without its secret."""

    id: str
    prefix: str
    tenant: str
    org: str | None
    role: str
    max_priority: int
    routes: Sequence[str] | None
    adapters: Sequence[str] | None
    tools: bool
    models: Sequence[str] | None
    aliases: dict[str, str]
    limits: dict[str, int]
    budget: dict[str, float]
    model_limits: dict[str, dict[str, int | float]]
    expires_at: str | None
    expired: bool
    comment: str
    created_at: str
    created_by: str
    last_used_at: str | None


class KeyListed(KeyShown):
    """A key, and the used part of its limits, its budget and its limits per model."""

    used: dict[str, int]
    spent: dict[str, float]
    model_used: dict[str, dict[str, int | float]]


class KeyChangedBody(KeyListed):
    """A changed key. ``warnings``: what does not exist now."""

    warnings: list[str]


class KeyMadeBody(KeyShown):
    """A new key; ``key`` is shown only once, here. ``warnings``: what does not exist now."""

    key: str
    warnings: list[str]


@dataclass(frozen=True, slots=True)
class KeyAdmin:
    """Shows and changes the keys; ``who`` is the acting key's id.

    ``warnings_of`` returns the warnings about a new or changed key, or raises InvalidRequest.

    A change is in force in this process when the call returns, in every other process within a second.
    """

    ring: KeyRing
    projection: KeyProjection
    use: KeyUse
    limiter: KeyLimiter
    audit: Audit
    unix_time: Callable[[], float]
    warnings_of: Callable[[KeyRecord], list[str]]

    async def show_all(self) -> list[KeyListed]:
        """Return the created keys; each limited one costs a query of the store: 100 take about 30 ms."""
        listed = list[KeyListed]()
        for number, key in enumerate(self.ring.created):
            if number % 20 == 0:
                await asyncio.sleep(0)  # let other tasks run: known figures never make this loop wait
            listed.append(await self._listed(key))
        return listed

    async def _listed(self, key: StoredKey) -> KeyListed:
        key_id, by_model = key.record.key_id, dict[str, dict[str, float]]()
        for one in key.record.model_limits:
            of_limits, of_budget = await self._used(key_id, one, one.model)
            by_model[one.model] = {**of_limits, **of_budget}
        used, spent = await self._used(key_id, key.record)
        return {**self._shown(key), "used": used, "spent": spent, "model_used": by_model}

    async def _used(
        self, key_id: str, limited: KeyRecord | ModelLimits, model: str | None = None
    ) -> tuple[dict[str, int], dict[str, float]]:
        used = await self.limiter.used(key_id, limited.limits, model)
        spent = await self.limiter.spent(key_id, limited.budget, model)
        return used, {name: one / NANOUSD for name, one in spent.items()}

    async def create(self, given: KeyBody, *, who: str) -> KeyMadeBody:
        """Create a key; only this answer has its secret. Raises InvalidRequest, Forbidden (too many keys)."""
        secret = draw_key()
        record = _record(given, f"key_{secret.prefix}", self._end_of(given))
        warnings, now = self.warnings_of(record), self.unix_time()
        key = StoredKey(record, secret.prefix, secret.salt, secret.digest, given.comment, who, now)
        if self.ring.get(record.key_id) is not None:
            raise InvalidRequest("the drawn prefix is taken; nothing was made, try again")
        target = f"{record.key_id} for {given.tenant} as {given.role.value}"
        async with self.audit.attempt(who, "key.create", target, comment=given.comment):
            await self.projection.make(key, author=who)
        return {**self._shown(key), "key": secret.key, "warnings": warnings}

    async def change(self, key_id: str, given: KeyChangeBody, *, who: str) -> KeyChangedBody:
        """Change a key's fields, for its next requests.

        Raises NoSuchKey, InvalidRequest, BackendUnavailable.
        """
        fields, warnings = given.model_dump(mode="json", exclude_unset=True), list[str]()
        if not fields:
            names = ", ".join(KeyChangeBody.model_fields)
            raise InvalidRequest(f"the change has no fields; allowed: {names}")

        def changed(key: StoredKey) -> StoredKey:
            now = self._shown(key)
            whole = {name: now[name] for name in KeyBody.model_fields} | fields  # type: ignore[literal-required]
            whole["limits"] = now["limits"] | fields.get("limits", {})
            whole["budget"] = now["budget"] | fields.get("budget", {})
            body = parse(KeyBody, orjson.dumps(whole))
            end = self._end_of(given) if "expires_at" in fields else key.record.expires_at
            record = _record(body, key_id, end)
            warnings[:] = self.warnings_of(record)
            return replace(key, record=record, comment=body.comment)

        target = f"{key_id} to {orjson.dumps(fields).decode()}"
        async with self.audit.attempt(who, "key.change", target, comment=given.comment):
            key = await self.projection.change(key_id, changed, author=who)
        return {**await self._listed(key), "warnings": warnings}

    def _end_of(self, given: KeyChangeBody) -> float | None:
        """The time at which the key expires. Raises InvalidRequest: it has passed, or cannot be shown."""
        now = self.unix_time()
        expires_at = None if given.expires_at is None else given.expires_at.timestamp()
        if expires_at is not None and not now < expires_at <= LATEST:
            allowed = f"later than now, {_time(now)}, and {_time(LATEST)} at the latest"
            shown = _time(expires_at) if EARLIEST <= expires_at <= LATEST else "beyond it"
            raise not_allowed("expires_at", f"is {shown}", allowed)
        return expires_at

    async def revoke(self, key_id: str, *, who: str) -> None:
        """Refuse a key from now on, even if the revocation cannot be stored or audited.

        Raises NoSuchKey, BackendUnavailable.
        """
        async with self.audit.attempt(who, "key.revoke", key_id, held_back=False):
            await self.projection.revoke(key_id, author=who)

    def _shown(self, key: StoredKey) -> KeyShown:
        record = key.record
        last_used, expires_at = self.use.last(record.key_id), record.expires_at
        return from_attributes(
            KeyShown,
            record,
            id=record.key_id,
            prefix=key.prefix,
            role=record.role.value,
            aliases=dict(record.aliases),
            limits=_limits(record.limits),
            budget=_budget(record.budget),
            model_limits={
                one.model: {**_limits(one.limits), **_budget(one.budget)} for one in record.model_limits
            },
            expires_at=None if expires_at is None else _time(expires_at),
            expired=expires_at is not None and expires_at <= self.unix_time(),
            comment=key.comment,
            created_at=_time(key.created_at),
            created_by=key.author,
            last_used_at=None if last_used is None else _time(last_used),
        )


def _record(given: KeyBody, key_id: str, expires_at: float | None) -> KeyRecord:
    default_priority = HIGHEST_PRIORITY if given.role is CallerRole.FRONT else 0
    return KeyRecord(
        **given.model_dump(include={"tenant", "org", "role", "routes", "adapters", "models", "tools"}),
        key_id=key_id,
        max_priority=default_priority if given.max_priority is None else given.max_priority,
        limits=_limits_of(given.limits),
        expires_at=expires_at,
        budget=budget_of(given.budget.usd_per_day, given.budget.usd_per_month),
        aliases=tuple(given.aliases.items()),
        model_limits=tuple(
            ModelLimits(model, _limits_of(one), budget_of(one.usd_per_day, one.usd_per_month))
            for model, one in given.model_limits.items()
        ),
    )


def _limits_of(given: KeyLimitsBody) -> KeyLimits:
    return KeyLimits(given.requests_per_minute, given.tokens_per_minute, given.tokens_per_day)


def _limits(limits: KeyLimits) -> dict[str, int]:
    return {name: limit for name, limit in asdict(limits).items() if limit is not None}


def _budget(budget: Budget) -> dict[str, float]:
    named = zip(BUDGETS, amounts(budget), strict=True)
    return {kind.name: amount / NANOUSD for kind, amount in named if amount is not None}


def _time(at: float) -> str:
    # A key of an older version may expire later than ISO 8601 can represent.
    return iso_time(min(at, LATEST))
