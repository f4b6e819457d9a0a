"""The response cache: answers stored for an outage, found by the same question.

Storing appends to a bounded outbox, which :meth:`ResponseCache.run` empties; lookups happen only when nothing
better can answer. A broken store is a miss and fails no request.
"""

import asyncio
import hashlib
import struct
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from resilience.response_cache_values import (
    AnswersLost,
    CachedAnswer,
    CacheEvent,
    CacheFigures,
    LookedUp,
    Lookup,
    Store,
    StoreBroke,
    StoredAnswer,
    StoreError,
    StoreIsBack,
)

# 256 bits: two different requests never share a key in practice, also when one of them is crafted.
KEY_BYTES = 32
# Answers that are written together.
BATCH = 64
# How long an answer waits for others of its batch: a thread for each would cost more.
GATHER_S = 0.1
# Pause after a failure of the store, so that an outage does not cost each request a timeout.
REST_S = 1.0
WRITE_TIMEOUT_S = 5.0


class ResponseCache:
    """Finds stored answers and stores new ones; callers put only complete, undegraded answers in.

    Args:
        clock: seconds; the store's clock.
        timeout_s: longest time of a lookup.
        outbox: answers that may wait to be stored; further ones are lost and counted.
    """

    def __init__(
        self,
        store: Store,
        *,
        clock: Callable[[], float],
        emit: Callable[[CacheEvent], None],
        timeout_s: float = 0.25,
        outbox: int = 1_000,
    ) -> None:
        self._store = store
        self._clock = clock
        self._emit = emit
        self._timeout_s = timeout_s
        self._outbox: deque[tuple[Callable[[], str], CachedAnswer, float]] = deque()
        self._outbox_size = outbox
        self._wake = asyncio.Event()
        self._broken = False
        self._rest_until = float("-inf")

    @property
    def waiting(self) -> int:
        """Answers that wait to be stored."""
        return len(self._outbox)

    def figures(self) -> CacheFigures | None:
        """The store's figures; ``None`` when another service reports them."""
        return self._store.figures()

    async def check(self) -> str | None:
        """Read from the store once; the class of the error when that fails."""
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self._store.get("check")
        except StoreError as error:
            return error.error_type
        except TimeoutError as error:
            return type(error).__name__
        return None

    async def close(self) -> None:
        """Close the store's connections; :meth:`run` does so itself."""
        await self._store.close()

    async def find(self, key: str, timeout_s: float | None = None) -> CachedAnswer | None:
        """The answer to the question of that key."""
        if self._clock() < self._rest_until:
            self._emit(LookedUp(Lookup.ERROR))
            return None
        limit = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        try:
            async with asyncio.timeout(limit):
                entry = await self._store.get(key)
        except (StoreError, TimeoutError) as error:
            self._failed(error)
            self._emit(LookedUp(Lookup.ERROR))
            return None
        self._worked()
        self._emit(LookedUp(Lookup.MISS if entry is None else Lookup.EXACT))
        return None if entry is None else entry.kept

    def remember(self, key: Callable[[], str], kept: CachedAnswer) -> None:
        """Store an answer soon; ``key`` is called later, in another thread."""
        if len(self._outbox) >= self._outbox_size:
            self._emit(AnswersLost(1, "outbox_full"))
            return
        self._outbox.append((key, kept, self._clock()))
        self._wake.set()

    async def run(self) -> None:
        """Store what was remembered, until cancelled; closes the store then."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                await asyncio.sleep(GATHER_S)
                await self.flush()
        finally:
            await self.close()

    async def flush(self) -> None:
        """Store what waits."""
        while self._outbox:
            await self._keep([self._outbox.popleft() for _ in range(min(BATCH, len(self._outbox)))])

    async def _keep(self, batch: Sequence[tuple[Callable[[], str], CachedAnswer, float]]) -> None:
        if self._clock() < self._rest_until:
            self._emit(AnswersLost(len(batch), "store"))
            return
        try:
            entries = await asyncio.to_thread(
                lambda: [StoredAnswer(key(), kept, put_at) for key, kept, put_at in batch]
            )
        except Exception as error:  # a defect; it must not end the loop
            self._emit(AnswersLost(len(batch), "defect", type(error).__name__))
            return
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self._store.put(entries)
        except (StoreError, TimeoutError) as error:
            self._failed(error)
            self._emit(AnswersLost(len(batch), "store"))
        else:
            self._worked()

    def _failed(self, error: StoreError | TimeoutError) -> None:
        self._rest_until = self._clock() + REST_S
        if not self._broken:
            self._broken = True
            self._emit(StoreBroke(error.error_type if isinstance(error, StoreError) else "TimeoutError"))

    def _worked(self) -> None:
        if self._broken:
            self._broken = False
            self._emit(StoreIsBack())


def digest_of(texts: Iterable[str | None], token_ids: Sequence[int] = ()) -> str:
    """64 hex digits; texts go in with their lengths, so that different lists give different bytes."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for text in texts:
        if text is None:
            digest.update(b"\x00")
            continue
        data = text.encode("utf-8", "surrogatepass")
        digest.update(b"\x01" + struct.pack("<q", len(data)) + data)
    ids = array("I", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()  # several machines may share one store
    digest.update(b"\x02")
    digest.update(ids)
    return digest.hexdigest()
