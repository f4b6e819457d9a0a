"""What admins see of the keys and do with them; each change is audited."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from accounting.keys import KeyLimits, KeyRecord, KeyRing, KeyRole, NewSecret, StoredKey, draw_key
from gateway.admin.ports import KeyOrder
from gateway.errors import GatewayError, InvalidRequest
from gateway.keys.last_used import KeyUse
from gateway.keys.registry import KeyProjection
from gateway.state.audit import Audit

# The last second that can be written, 9999-12-31T23:59:59Z: no key is made that could not be shown.
LATEST = 253_402_300_799.0


@dataclass(frozen=True, slots=True)
class KeyAdmin:
    """Implements ``gateway.ports.KeyService``.

    Args:
        ring: the keys in force.
        book: changes them.
        use: when they were used.
        audit: who did what.
        unix_time: seconds since 1970.
        draw: makes a secret.
    """

    ring: KeyRing
    book: KeyProjection
    use: KeyUse
    audit: Audit
    unix_time: Callable[[], float]
    draw: Callable[[], NewSecret] = draw_key

    def show_all(self) -> Mapping[str, object]:
        """The keys that were made and not revoked, oldest first."""
        return {"keys": [self._shown(key) for key in self.ring.made]}

    async def create(self, order: KeyOrder, *, who: str) -> Mapping[str, object]:
        """Make a key; ``key`` of the answer is never shown again.

        Raises InvalidRequest, Forbidden, BackendUnavailable.
        """
        now = self.unix_time()
        if order.expires_at is not None and not now < order.expires_at <= LATEST:
            allowed = f"later than now, {_time(now)}, and {_time(LATEST)} at the latest"
            shown = _time(order.expires_at) if order.expires_at <= LATEST else "beyond it"
            raise InvalidRequest(f"expires_at is {shown}; allowed: {allowed}", param="expires_at")
        secret = self.draw()
        record = KeyRecord(
            f"key_{secret.prefix}",
            order.tenant,
            KeyRole(order.role),
            order.max_priority,
            order.routes,
            order.adapters,
            KeyLimits(order.requests_per_minute, order.tokens_per_minute, order.tokens_per_day),
            order.expires_at,
            order.org,
        )
        key = StoredKey(record, secret.prefix, secret.salt, secret.digest, order.comment, who, now)
        if self.ring.get(record.key_id) is not None:
            raise InvalidRequest("the drawn prefix is taken; nothing was made, try again")
        target = f"{record.key_id} for {order.tenant} as {order.role.value}"
        await self._audited(who, "key.create", target, self.book.make(key, author=who), order.comment)
        return {"id": record.key_id, "key": secret.key, **self._shown(key)}

    async def revoke(self, key_id: str, *, who: str) -> None:
        """Refuse a key from now on. Raises NoSuchKey, BackendUnavailable."""
        await self._audited(who, "key.revoke", key_id, self.book.revoke(key_id, author=who))

    async def _audited(
        self, who: str, action: str, target: str, doing: Awaitable[None], comment: str = ""
    ) -> None:
        try:
            await doing
        except GatewayError as error:
            await self.audit.record(who, action, target, comment=comment, result=f"refused: {error}")
            raise
        await self.audit.record(who, action, target, comment=comment)

    def _shown(self, key: StoredKey) -> Mapping[str, object]:
        record = key.record
        last_used = self.use.last(record.key_id)
        expires_at = record.expires_at
        return {
            "id": record.key_id,
            "prefix": key.prefix,
            "tenant": record.tenant,
            "org": record.org,
            "role": record.role.value,
            "max_priority": record.max_priority,
            "routes": None if record.routes is None else list(record.routes),
            "adapters": None if record.adapters is None else list(record.adapters),
            "limits": {name: limit for name, limit in asdict(record.limits).items() if limit is not None},
            "expires_at": None if expires_at is None else _time(expires_at),
            "expired": expires_at is not None and expires_at <= self.unix_time(),
            "comment": key.comment,
            "created_at": _time(key.created_at),
            "created_by": key.author,
            "last_used_at": None if last_used is None else _time(last_used),
        }


def _time(at: float) -> str:
    # A key that an older version made may expire later than can be written.
    return datetime.fromtimestamp(min(at, LATEST), UTC).isoformat(timespec="seconds")
