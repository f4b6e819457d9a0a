"""Idempotent replies in Redis: each under a key that expires, indexed by time to bound their number."""

import hashlib
from collections.abc import Callable

import msgspec
from redis.asyncio import Redis

from gateway.state.idempotency import KEEP_S, MAX_REPLIES, StoredReply
from gateway.state.redis_client import ask, prefix

# Stores the reply unless there is one that has not expired by our clock (Redis expires by its own). Then it
# drops expired replies from the index, and the oldest beyond the bound from the store: their keys are not
# declared to the script, but are in the namespace's slot.
_PUT = """
local at = redis.call('ZSCORE', KEYS[2], KEYS[1])
if at and tonumber(at) >= tonumber(ARGV[4]) and redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('ZADD', KEYS[2], ARGV[3], KEYS[1])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', '(' .. ARGV[4])
local excess = redis.call('ZCARD', KEYS[2]) - tonumber(ARGV[5])
if excess > 0 then
  local oldest = redis.call('ZPOPMIN', KEYS[2], excess)
  for i = 1, #oldest, 2 do redis.call('DEL', oldest[i]) end
end
return 1
"""


class _Stored(msgspec.Struct, array_like=True):
    fingerprint: str
    status: int
    content_type: str
    body: bytes
    stored_at: float


class RedisIdempotencyStore:
    """Stores replies for 24 hours in Redis.

    Args:
        client: as ``redis_client.connect`` makes it; this store closes it.
    """

    def __init__(
        self,
        client: Redis,
        *,
        namespace: str,
        unix_time: Callable[[], float],
        max_replies: int = MAX_REPLIES,
    ) -> None:
        self._client = client
        self._prefix = prefix(namespace) + "reply:"
        self._index = prefix(namespace) + "replies"
        self._unix_time = unix_time
        self._max_replies = max_replies

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def get(self, tenant: str, key: str) -> tuple[str, StoredReply] | None:
        """The body's fingerprint and the reply, when stored within the last 24 hours."""
        found = await ask(self._client, "get", self._client.get(self._key(tenant, key)))
        if found is None:
            return None
        stored = msgspec.msgpack.decode(found, type=_Stored)
        # Redis expires by its own clock, which may differ from ours.
        if stored.stored_at < self._unix_time() - KEEP_S:
            return None
        return stored.fingerprint, StoredReply(stored.status, stored.content_type, stored.body)

    async def put(self, tenant: str, key: str, fingerprint: str, reply: StoredReply) -> None:
        """Store a reply; the first one under a key stays until it has expired."""
        now, name = self._unix_time(), self._key(tenant, key)
        row = _Stored(fingerprint, reply.status, reply.content_type, reply.body, now)
        arguments: tuple[bytes | float, ...] = (
            msgspec.msgpack.encode(row),
            int(KEEP_S * 1000),
            now,
            now - KEEP_S,
            self._max_replies,
        )
        await ask(
            self._client, "put", self._client.eval(_PUT, 2, name, self._index, *map(_argument, arguments))
        )

    def _key(self, tenant: str, key: str) -> str:
        # Hashed, because a caller's key may be long; the length keeps tenant and key apart.
        digest = hashlib.sha256(f"{len(tenant)}:{tenant}{key}".encode("utf-8", "surrogatepass"))
        return self._prefix + digest.hexdigest()


def _argument(value: bytes | float) -> bytes | str:
    # In full: Redis' own way of writing a float drops digits of a time.
    return value if isinstance(value, bytes) else repr(value)
