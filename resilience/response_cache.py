"""The response cache: answers stored for an outage, found by the same question or by a similar one.

Storing appends to a bounded outbox, which :meth:`ResponseCache.run` empties; lookups happen only when nothing
better can answer. A broken store is a miss and fails no request.
"""

import asyncio
import hashlib
import struct
import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from resilience.response_cache_values import (
    AnswersLost,
    CachedAnswer,
    CacheEvent,
    CacheFigures,
    CacheQuestion,
    Embedder,
    Hit,
    LookedUp,
    Lookup,
    Meaning,
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
# Questions that are embedded at the first lookup of a similar one; older ones are found by their key alone.
MAX_UNREAD = 4_096
# Concurrent lookups of similar questions, each less than a millisecond in a thread; others look by key alone.
MAX_LOOKING = 32
# Pause after a failure of the store, so that an outage does not cost each request a timeout.
REST_S = 1.0
WRITE_TIMEOUT_S = 5.0


class ResponseCache:
    """Finds stored answers and stores new ones; callers put only complete, undegraded answers in.

    Args:
        embedder: finds similar questions; ``None``: only the same question is answered.
        clock: seconds; the store's clock.
        timeout_s: longest time of a lookup.
        outbox: answers that may wait to be stored; further ones are lost and counted.
    """

    def __init__(
        self,
        store: Store,
        *,
        embedder: Embedder | None,
        clock: Callable[[], float],
        emit: Callable[[CacheEvent], None],
        timeout_s: float = 0.25,
        outbox: int = 1_000,
    ) -> None:
        self._store = store
        self._embedder = embedder
        self._clock = clock
        self._emit = emit
        self._timeout_s = timeout_s
        self._outbox: deque[tuple[Callable[[], CacheQuestion], CachedAnswer, float]] = deque()
        self._outbox_size = outbox
        self._wake = asyncio.Event()
        self._looking = 0
        self._broken = False
        self._rest_until = float("-inf")
        # By scope, the keys and texts of questions that are not embedded yet, oldest first.
        self._unread: dict[str, dict[str, str]] = {}
        self._unread_keys: OrderedDict[tuple[str, str], None] = OrderedDict()

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

    async def find(self, question: CacheQuestion, timeout_s: float | None = None) -> Hit | None:
        """The answer to the same question, else to the most similar one that is similar enough."""
        if self._clock() < self._rest_until:
            self._emit(LookedUp(Lookup.ERROR))
            return None
        limit = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        try:
            async with asyncio.timeout(limit):
                hit = await self._look(question)
        except (StoreError, TimeoutError) as error:
            self._failed(error)
            self._emit(LookedUp(Lookup.ERROR))
            return None
        self._worked()
        kind = Lookup.MISS if hit is None else Lookup.EXACT if hit.exact else Lookup.SIMILAR
        self._emit(LookedUp(kind))
        return hit

    def remember(self, question: Callable[[], CacheQuestion], kept: CachedAnswer) -> None:
        """Store an answer soon; ``question`` is called later, in another thread."""
        if len(self._outbox) >= self._outbox_size:
            self._emit(AnswersLost(1, "outbox_full"))
            return
        self._outbox.append((question, kept, self._clock()))
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

    async def _look(self, question: CacheQuestion) -> Hit | None:
        entry = await self._store.get(question.key)
        if entry is not None:
            return Hit(entry.kept, 1.0, self._age_s(entry), exact=True)
        embedder, text = self._embedder, question.text
        if embedder is None or text is None or self._looking >= MAX_LOOKING:
            return None
        self._looking += 1
        try:
            meaning = await asyncio.to_thread(embedder.meaning, text)
            if meaning is None:
                return None
            await self._read(question.scope, embedder)
            candidates = await self._store.shelf(shelf_of(question.scope, meaning, embedder))
            best = await asyncio.to_thread(_best, meaning, candidates) if candidates else None
            if best is None:
                return None
            key, likeness = best
            entry = await self._store.get(key)
            if entry is None or not entry.kept.similar:
                return None
            return Hit(entry.kept, likeness, self._age_s(entry), exact=False)
        finally:
            self._looking -= 1

    async def _keep(self, batch: Sequence[tuple[Callable[[], CacheQuestion], CachedAnswer, float]]) -> None:
        if self._clock() < self._rest_until:
            self._emit(AnswersLost(len(batch), "store"))
            return
        try:
            entries = await asyncio.to_thread(lambda: [self._entry(*item) for item in batch])
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

    def _entry(self, ask: Callable[[], CacheQuestion], kept: CachedAnswer, put_at: float) -> StoredAnswer:
        question, embedder = ask(), self._embedder
        entry = StoredAnswer(question.key, kept, put_at)
        if embedder is None or question.text is None or not kept.similar:
            return entry
        if self._store.figures() is not None:  # in this process: it can be embedded later
            self._keep_unread(question.scope, question.key, question.text)
            return entry
        return _placed(entry, question.scope, question.text, embedder)

    def _keep_unread(self, scope: str, key: str, text: str) -> None:
        self._unread.setdefault(scope, {})[key] = text
        self._unread_keys[scope, key] = None
        self._unread_keys.move_to_end((scope, key))
        while len(self._unread_keys) > MAX_UNREAD:
            (old_scope, old_key), _ = self._unread_keys.popitem(last=False)
            texts = self._unread[old_scope]
            del texts[old_key]
            if not texts:
                del self._unread[old_scope]

    async def _read(self, scope: str, embedder: Embedder) -> None:
        """Embed the questions of a scope that are not embedded yet."""
        texts = self._unread.pop(scope, {})
        entries = []
        for key in texts:
            del self._unread_keys[scope, key]
            entry = await self._store.get(key)
            if entry is not None:
                entries.append(entry)
        if entries:
            placed = await asyncio.to_thread(
                lambda: [_placed(entry, scope, texts[entry.key], embedder) for entry in entries]
            )
            await self._store.put(placed)

    def _age_s(self, entry: StoredAnswer) -> float:
        return max(0.0, self._clock() - entry.put_at)

    def _failed(self, error: StoreError | TimeoutError) -> None:
        self._rest_until = self._clock() + REST_S
        if not self._broken:
            self._broken = True
            self._emit(StoreBroke(error.error_type if isinstance(error, StoreError) else "TimeoutError"))

    def _worked(self) -> None:
        if self._broken:
            self._broken = False
            self._emit(StoreIsBack())


def _placed(entry: StoredAnswer, scope: str, text: str, embedder: Embedder) -> StoredAnswer:
    """The entry on the shelf of its question; unchanged when the question cannot be embedded."""
    meaning = embedder.meaning(text)
    if meaning is None:
        return entry
    return replace(entry, shelf=shelf_of(scope, meaning, embedder), vector=pack(meaning.vector))


def shelf_of(scope: str, meaning: Meaning, embedder: Embedder) -> str:
    """The shelf of questions of one scope, the same facts and one model."""
    return digest_of([embedder.fingerprint, scope, *meaning.facts])


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


def pack(vector: Sequence[float]) -> bytes:
    """A vector as it is stored."""
    return struct.pack(f"<{len(vector)}f", *vector)


def _best(meaning: Meaning, candidates: Sequence[tuple[str, bytes]]) -> tuple[str, float] | None:
    """The most similar candidate, if it is similar enough; of several the newest."""
    best, likeness = None, meaning.threshold
    for key, data in candidates:
        if len(data) != 4 * len(meaning.vector):
            continue  # only one of the two questions has a known word
        similarity = meaning.similarity(struct.unpack(f"<{len(meaning.vector)}f", data))
        if similarity >= likeness and (best is None or similarity > likeness):
            best, likeness = key, similarity
    return None if best is None else (best, min(1.0, likeness))
