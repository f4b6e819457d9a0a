"""The response cache: answers stored for an outage, found by the same question or by a similar one.

Storing appends to a bounded outbox, which :meth:`ResponseCache.run` empties; lookups happen only when nothing
better can answer. A broken store counts as a miss and fails no request.
"""

import asyncio
import hashlib
import struct
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Final

from resilience.question_vectors import nearest, unit_vector
from resilience.response_cache_values import (
    AnswersLost,
    CachedAnswer,
    CacheEvent,
    Embedder,
    EmbedderError,
    LookedUp,
    Lookup,
    Question,
    Store,
    StoreBroke,
    StoredAnswer,
    StoreError,
    StoreIsBack,
)

# 256 bits: two different requests never share a key in practice, even if one of them is crafted.
KEY_BYTES = 32
BATCH = 64  # most answers that are written together
GATHER_S = 0.1  # how long an answer waits for others of its batch, since a thread per answer would cost more
# Pause after a failure of the store, so that an outage does not cost each request a timeout.
REST_S = 1.0
WRITE_TIMEOUT_S = 5.0
EMBED_TIMEOUT_S: Final = 2.0  # longest time that a batch of answers waits for the vectors of its questions
EMBEDDER_REST_S: Final = 5.0  # pause after a failure of the embedder
MAX_LOOKING: Final = 64
"""Most lookups that wait for a vector at the same time; further ones find only the same question."""
# (key, answer, question, time): `key` and `question` are called later, in another thread.
_Waiting = tuple[Callable[[], str], CachedAnswer, Callable[[], Question | None], float]


@dataclass(slots=True, eq=False)
class ResponseCache:
    """Finds stored answers and stores new ones; callers must store only complete, undegraded answers.

    Args:
        clock: seconds; the store's clock.
        timeout_s: longest time of a lookup.
        outbox: answers that may wait to be stored; further ones are lost and counted.
    """

    store: Store
    _: KW_ONLY
    clock: Callable[[], float]
    emit: Callable[[CacheEvent], None]
    timeout_s: float = 0.25
    outbox: int = 1_000
    # Computes the vectors of questions; ``None``: only the same question is found.
    embedder: Embedder | None = None
    waiting: deque[_Waiting] = field(default_factory=deque, init=False)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _broken: bool = False
    _rest_until: float = float("-inf")
    _embedder_rest_until: float = float("-inf")
    _looking: int = 0

    async def check(self) -> str | None:
        """Read from the store once; returns the class of the error if that fails."""
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self.store.get("check")
        except StoreError as error:
            return error.error_type
        except TimeoutError as error:
            return type(error).__name__
        return None

    async def close(self) -> None:
        """Close the store's connections; :meth:`run` does so itself."""
        await self.store.close()

    async def find(
        self, key: str, timeout_s: float | None = None, question: Question | None = None
    ) -> CachedAnswer | None:
        """The answer stored under ``key``, else that of the most similar question, if similar enough.

        Computing a vector may take half of ``timeout_s``.
        """
        if self._rests(self._rest_until, REST_S):
            self.emit(LookedUp(Lookup.ERROR))
            return None
        limit = self.timeout_s if timeout_s is None else min(timeout_s, self.timeout_s)
        try:
            result, found = await self._look(key, limit, question)
        except (StoreError, TimeoutError) as error:
            if isinstance(error, StoreError) or limit >= self.timeout_s:  # not a caller's own deadline
                self._failed(error)
            self.emit(LookedUp(Lookup.ERROR))
            return None
        self._worked()
        self.emit(LookedUp(result))
        return found

    def remember(
        self,
        key: Callable[[], str],
        answer: CachedAnswer,
        question: Callable[[], Question | None] = lambda: None,
    ) -> None:
        """Queue an answer to be stored; ``key`` and ``question`` are called later, in another thread."""
        if len(self.waiting) >= self.outbox:
            self.emit(AnswersLost(1, "outbox_full"))
            return
        self.waiting.append((key, answer, question, self.clock()))
        self._wake.set()

    async def run(self) -> None:
        """Store queued answers until cancelled; then close the store."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                await asyncio.sleep(GATHER_S)
                await self.flush()
        finally:
            await self.close()

    async def flush(self) -> None:
        while self.waiting:
            await self._store_batch([self.waiting.popleft() for _ in range(min(BATCH, len(self.waiting)))])

    async def _look(
        self, key: str, limit_s: float, question: Question | None
    ) -> tuple[Lookup, CachedAnswer | None]:
        deadline = asyncio.get_running_loop().time() + limit_s
        async with asyncio.timeout_at(deadline):
            entry = await self.store.get(key)
        if entry is not None:
            return Lookup.EXACT, entry.answer
        if question is None:
            return Lookup.MISS, None
        vector = await self._vector(question, limit_s / 2)
        if vector is None:
            return Lookup.NO_VECTOR, None
        async with asyncio.timeout_at(deadline):
            found = await self._most_similar(question, vector)
        return (Lookup.MISS if found is None else Lookup.SIMILAR), found

    async def _store_batch(self, batch: Sequence[_Waiting]) -> None:
        if self._rests(self._rest_until, REST_S):
            self.emit(AnswersLost(len(batch), "store"))
            return
        try:
            described = await asyncio.to_thread(
                lambda: [
                    (StoredAnswer(key(), answer, put_at), question())
                    for key, answer, question, put_at in batch
                ]
            )
        except Exception as error:  # a defect; it must not end the loop
            self.emit(AnswersLost(len(batch), "defect", type(error).__name__))
            return
        entries = await self._shelved(described)
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self.store.put(entries)
        except (StoreError, TimeoutError) as error:
            self._failed(error)
            self.emit(AnswersLost(len(batch), "store"))
        else:
            self._worked()

    async def _shelved(
        self, described: Sequence[tuple[StoredAnswer, Question | None]]
    ) -> Sequence[StoredAnswer]:
        """The entries; one whose question has a vector gets this vector and the question's shelf."""
        groups: dict[tuple[str, str], list[Question]] = {}
        for _, question in described:
            if question is not None:
                groups.setdefault((question.tenant, question.model), []).append(question)
        async with asyncio.TaskGroup() as tasks:
            made = [
                tasks.create_task(self._vectors(tenant, model, questions, EMBED_TIMEOUT_S))
                for (tenant, model), questions in groups.items()
            ]
        vectors = {question: vector for task in made for question, vector in task.result().items()}
        missing = sum(question is not None and question not in vectors for _, question in described)
        if missing:
            self.emit(AnswersLost(missing, "no_vector"))
        return [
            entry
            if question is None or question not in vectors
            else replace(entry, shelf=question.shelf, vector=vectors[question])
            for entry, question in described
        ]

    async def _vector(self, question: Question, timeout_s: float) -> bytes | None:
        if self._looking >= MAX_LOOKING:
            return None
        self._looking += 1
        try:
            made = await self._vectors(question.tenant, question.model, [question], timeout_s)
        finally:
            self._looking -= 1
        return made.get(question)

    async def _vectors(
        self, tenant: str, model: str, questions: Sequence[Question], timeout_s: float
    ) -> Mapping[Question, bytes]:
        """Vectors of length 1 by question; empty if the embedder fails, is too slow or still pauses."""
        if self.embedder is None or self._rests(self._embedder_rest_until, EMBEDDER_REST_S):
            return {}
        try:
            async with asyncio.timeout(timeout_s):
                made = await self.embedder.embed(tenant, model, [one.text for one in questions])
        except (EmbedderError, TimeoutError) as error:
            if isinstance(error, EmbedderError) or timeout_s >= min(self.timeout_s / 2, EMBED_TIMEOUT_S):
                self._embedder_rest_until = self.clock() + EMBEDDER_REST_S
            return {}
        return {
            question: unit
            for question, vector in zip(questions, made, strict=True)
            if (unit := unit_vector(vector)) is not None
        }

    async def _most_similar(self, question: Question, vector: bytes) -> CachedAnswer | None:
        candidates = await self.store.shelf(question.shelf)
        if not candidates:
            return None
        likely = await asyncio.to_thread(nearest, vector, candidates, question.threshold)
        for similarity, key in likely:
            if (entry := await self.store.get(key)) is not None:
                return replace(entry.answer, similarity=similarity)
        return None

    def _rests(self, until: float, for_s: float) -> bool:
        """Whether a pause of ``for_s`` lasts; one of more than two is of a clock that was set back."""
        return 0 < until - self.clock() <= 2 * for_s

    def _failed(self, error: StoreError | TimeoutError) -> None:
        self._rest_until = self.clock() + REST_S
        if not self._broken:
            self._broken = True
            self.emit(StoreBroke(error.error_type if isinstance(error, StoreError) else "TimeoutError"))

    def _worked(self) -> None:
        if self._broken:
            self._broken = False
            self.emit(StoreIsBack())


def digest_of(texts: Iterable[str | None], token_ids: Sequence[int] = ()) -> str:
    """A digest of 64 hex digits; texts are hashed with their lengths, so that different lists differ."""
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
