"""A store of answers in Redis, shared by gateway processes and across their restarts; it stores no questions.

An entry is one key that expires; a shelf is a list of keys and vectors. Redis' own ``maxmemory`` bounds the
memory; there are no locks.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from resilience.response_cache_values import (
    MAX_SHELF,
    CacheFigures,
    StoredAnswer,
    StoreError,
)

# uvloop raises RuntimeError where redis-py writes to a connection that has just been closed.
_ERRORS = (RedisError, OSError, RuntimeError)
_read_place = msgspec.msgpack.Decoder(tuple[str, bytes]).decode
_NO_BYTES = msgspec.msgpack.encode(b"")
# The same question may have had a slightly different vector, so its row is found by how it begins.
_REMOVE_ROW = """
for _, row in ipairs(redis.call('LRANGE', KEYS[1], 0, -1)) do
  if string.sub(row, 1, #ARGV[1]) == ARGV[1] then redis.call('LREM', KEYS[1], 1, row) end
end
"""


@dataclass(frozen=True, slots=True)
class RedisStore:
    """A store in Redis.

    Args:
        client: must have bounds and timeouts; closed with the store.
        ttl_s: age at which an entry expires, seconds.
        unix_time: seconds since 1970; all processes must roughly agree on it.
    """

    client: Redis
    prefix: str
    ttl_s: float
    unix_time: Callable[[], float]

    async def get(self, key: str) -> StoredAnswer | None:
        try:
            data = cast(bytes | None, await self.client.get(self._name(key)))
            entry = None if data is None else msgspec.msgpack.decode(data, type=StoredAnswer)
        except (*_ERRORS, msgspec.MsgspecError) as error:
            raise StoreError(type(error).__name__) from error
        # Another machine's clock may be a little ahead.
        return entry if entry is not None and self.unix_time() - entry.put_at < self.ttl_s else None

    async def shelf(self, shelf: str) -> Sequence[tuple[str, bytes]]:
        try:
            rows = await cast("Awaitable[list[bytes]]", self.client.lrange(self._shelf(shelf), 0, -1))
            return [_read_place(row) for row in rows]
        except (*_ERRORS, msgspec.MsgspecError) as error:
            raise StoreError(type(error).__name__) from error

    async def put(self, entries: Sequence[StoredAnswer]) -> None:
        ttl_ms = max(1, round(self.ttl_s * 1000))
        try:
            async with self.client.pipeline(transaction=False) as pipeline:
                for entry in entries:
                    row = msgspec.msgpack.encode(replace(entry, shelf=None, vector=b""))
                    pipeline.set(self._name(entry.key), row, px=ttl_ms)
                    if entry.shelf is not None:
                        shelf = self._shelf(entry.shelf)
                        begins = msgspec.msgpack.encode((entry.key, b"")).removesuffix(_NO_BYTES)
                        pipeline.eval(_REMOVE_ROW, 1, shelf, begins)
                        pipeline.lpush(shelf, msgspec.msgpack.encode((entry.key, entry.vector)))
                        pipeline.ltrim(shelf, 0, MAX_SHELF - 1)
                        pipeline.pexpire(shelf, ttl_ms)
                await pipeline.execute()
        except _ERRORS as error:
            raise StoreError(type(error).__name__) from error

    def figures(self) -> CacheFigures | None:
        """Always ``None``: Redis reports its own figures."""
        return None

    async def close(self) -> None:
        await self.client.aclose()

    def _name(self, key: str) -> str:
        # Entries of earlier versions have other forms, under ``answer:`` and ``text:``.
        return f"{self.prefix}entry:{key}"

    def _shelf(self, shelf: str) -> str:
        return f"{self.prefix}similar:{shelf}"
