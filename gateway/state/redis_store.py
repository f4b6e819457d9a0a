"""Streams in Redis, for a fleet: a list per stream, a hash of heads, a channel that announces appends."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import orjson
from redis.asyncio import Redis

from gateway.state.errors import Conflict, StateUnavailable
from gateway.state.port import MAX_READ, POLL_S, Record, StateStore, check_size
from gateway.state.redis_client import REDIS_ERRORS, ask, end_if_cancelled, prefix

_ANNOUNCED = "0"  # sent instead of a record's number with an announced text
LISTEN_S = 5.0  # longest wait for one message, in seconds

# Compares, appends and publishes atomically. The head is the list's length plus the count of deleted records;
# if the hash of heads differs, keys were evicted or deleted, and nothing is written. Records are written even
# if Redis is full, because a revocation must be: without memory, Redis refuses only the first write of a
# script, and never a deletion. So the script first deletes a key, which does not exist.
_APPEND = """
local head = redis.call('LLEN', KEYS[1]) + tonumber(redis.call('HGET', KEYS[4], ARGV[1]) or '0')
if head ~= tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or '0') then return {-1, head} end
if ARGV[2] ~= '' and tonumber(ARGV[2]) ~= head then return {0, head} end
redis.call('DEL', KEYS[1] .. ':none')
redis.call('RPUSH', KEYS[1], ARGV[3])
redis.call('HSET', KEYS[2], ARGV[1], head + 1)
redis.call('PUBLISH', KEYS[3], (head + 1) .. ' ' .. ARGV[1])
return {1, head + 1}
"""
# Returns the number that precedes the first record, and the records.
_READ = """
local gone = tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or '0')
local first, limit = math.max(tonumber(ARGV[2]), gone), tonumber(ARGV[3])
local last = first + limit - 1
if ARGV[4] == '1' then
  last = gone + redis.call('LLEN', KEYS[1]) - 1
  first = math.max(first, last - limit + 1)
end
if last < first then return {first, {}} end
return {first, redis.call('LRANGE', KEYS[1], first - gone, last - gone)}
"""
_FORGET = """
local gone = tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or '0')
local up_to = math.min(tonumber(ARGV[2]), gone + redis.call('LLEN', KEYS[1]))
if up_to <= gone then return 0 end
redis.call('LTRIM', KEYS[1], up_to - gone, -1)
redis.call('HSET', KEYS[2], ARGV[1], up_to)
return up_to - gone
"""


class RedisStateStore(StateStore):
    """A store in Redis.

    Args:
        client: made by ``redis_client.connect``; this store closes it.
        shown: the url without its password.
        namespace: prefix of the keys; fleets with different namespaces may share one Redis.
    """

    def __init__(
        self,
        client: Redis,
        *,
        shown: str,
        namespace: str,
        unix_time: Callable[[], float],
        poll_s: float = POLL_S,
    ) -> None:
        super().__init__(shown, unix_time, poll_s)
        self._client = client
        keys = prefix(namespace)
        self._gone_key = f"{keys}forgotten"
        self._heads_key, self._channel, self._stream_key = f"{keys}heads", f"{keys}told", f"{keys}stream:"

    async def close(self) -> None:
        await self._client.aclose()

    async def append(self, stream: str, data: bytes, *, author: str, expected: int | None = None) -> Record:
        """Add a record; as durable as Redis is configured to be."""
        check_size(stream, data)
        at = self._unix_time()
        stored = orjson.dumps({"at": at, "author": author}) + b"\n" + data
        keys = (f"{self._stream_key}{stream}", self._heads_key, self._channel, self._gone_key)
        seen = "" if expected is None else str(expected)
        done, number = await self._ask("append", self._client.eval(_APPEND, 4, *keys, stream, seen, stored))
        if done < 0:
            reason = f"stream {stream!r} is damaged: its list has {number} records, its head says otherwise"
            raise StateUnavailable("append", reason)
        if not done:
            raise Conflict(stream, cast(int, expected), number)
        self._notify(stream, number)
        return Record(stream, number, at, author, data)

    async def read(
        self, stream: str, *, after: int = 0, limit: int = MAX_READ, newest_first: bool = False
    ) -> Sequence[Record]:
        arguments = (stream, after, limit, int(newest_first))
        keys = (f"{self._stream_key}{stream}", self._gone_key)
        first, stored = await self._ask("read", self._client.eval(_READ, 2, *keys, *map(str, arguments)))
        records = [_record(stream, number, one) for number, one in enumerate(stored, first + 1)]
        return records[::-1] if newest_first else records

    async def forget(self, stream: str, up_to: int) -> None:
        keys = (f"{self._stream_key}{stream}", self._gone_key)
        await self._ask("forget", self._client.eval(_FORGET, 2, *keys, stream, str(up_to)))

    async def heads(self) -> Mapping[str, int]:
        if self.refuses_writes:
            with contextlib.suppress(StateUnavailable):
                await self._ask("write", self._client.delete(f"{self._heads_key}:none"))
                self.refuses_writes = False
        found = await self._ask("heads", self._client.hgetall(self._heads_key))
        return {stream.decode(): int(number) for stream, number in found.items()}

    async def announce(self, stream: str, text: str) -> None:
        """Publish ``text``; this works even if Redis is full or read-only."""
        with contextlib.suppress(StateUnavailable):
            await self._ask("announce", self._client.publish(self._channel, f"{_ANNOUNCED} {stream} {text}"))

    async def run(self) -> None:
        """Subscribe to appends on one connection, and poll on the others in case that connection is dead."""
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._subscribe(), name="state-subscribe")
            loops.create_task(super().run(), name="state-poll")

    async def _subscribe(self) -> None:
        while True:
            # The poll shows whether Redis is reachable; this loop only subscribes again.
            with contextlib.suppress(*REDIS_ERRORS):
                async with self._client.pubsub(ignore_subscribe_messages=True) as channel:
                    await channel.subscribe(self._channel)
                    end_if_cancelled()
                    while True:
                        message = await channel.get_message(timeout=LISTEN_S)
                        end_if_cancelled()
                        if message is not None:
                            number, stream = message["data"].decode().split(" ", 1)
                            if number == _ANNOUNCED:
                                self._announced(*stream.split(" ", 1))
                            else:
                                self._notify(stream, int(number))
            end_if_cancelled()
            await asyncio.sleep(self._poll_s)

    async def _ask(self, operation: str, command: object) -> Any:
        try:
            answer = await ask(self._client, operation, command)
        except StateUnavailable as error:
            self._failed(operation, error.reason)
            if error.writes_refused:
                self.refuses_writes = self.healthy = True
            raise
        self._reached()
        return answer


def _record(stream: str, number: int, stored: bytes) -> Record:
    head, data = stored.split(b"\n", 1)
    fields = orjson.loads(head)
    return Record(stream, number, fields["at"], fields["author"], data)
