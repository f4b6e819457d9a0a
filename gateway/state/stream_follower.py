"""Keeps a process up with one stream, in order, each record once, and through the store's absence.

At each look the last record that was applied is read again, with what follows it. When it is missing, or
another one, the store has lost records that this process has seen (a Redis that lost its disk, a file put
back from a backup). Then nothing is applied and nothing is undone: the last good state stays in force,
``healthy`` is false, an error is logged, and an operator decides (``docs/state.md``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.state.errors import StateUnavailable
from gateway.state.local_copy import LocalCopy
from gateway.state.port import Record, StateStore
from gateway.state.projection import START_TIMEOUT_S, ProjectionState, StreamProjection

PAGE = 100
# How often a stream that does not grow is compared with what was applied.
VERIFY_S = 10.0
# The copy may lag so much behind: writing it waits for the disk, and it is for the store's absence only.
COPY_S = 1.0


class StreamFollower(StreamProjection):
    """Applies a stream's records to a projection.

    Args:
        store: where the stream is; its ``run`` runs beside this one's.
        stream: its name.
        apply: takes each record in order, exactly once; must not block. What it raises stops the stream
            before that record: it must have changed nothing then, and is given the record again later.
        copy: the file for the store's absence; ``None``: without one nothing is in force until the store
            is reached.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: StateStore,
        stream: str,
        apply: Callable[[Record], None],
        *,
        copy: LocalCopy | None,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(store, stream, apply)
        self._copy = copy
        self._clock = clock
        self._verified_at: float | None = None
        self._grown = asyncio.Event()

    @property
    def healthy(self) -> bool:
        """Whether what is in force is known to be what the store says."""
        return self._state is ProjectionState.FOLLOWING and self._store.healthy

    async def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Bring the last known state into force: the local copy's, and what the store has beyond it.

        A store that does not answer within ``timeout_s`` is logged, and ``run`` catches up when it is back.
        """
        if self._copy is not None:
            for record in await asyncio.to_thread(self._copy.load):
                if not await self._take(record):
                    break
        try:
            async with asyncio.timeout(timeout_s):
                await self._catch_up()
        except (StateUnavailable, TimeoutError):
            self._log.warning(
                "state store away at the start; the local copy is in force",
                stream=self._stream,
                number=self.number,
            )

    async def run(self) -> None:
        """Keep up, and keep the local copy, until cancelled."""
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._keep_up(), name=f"follow-{self._stream}")
            if self._copy is not None:
                loops.create_task(self._keep_copy(self._copy), name=f"copy-{self._stream}")

    def _must_verify(self) -> bool:
        return self._verified_at is None or self._clock() - self._verified_at >= VERIFY_S

    async def _catch_up(self) -> None:
        """Apply what is new. Raises StateUnavailable."""
        while True:
            last = self._last
            page = await self._store.read(self._stream, after=max(self.number - 1, 0), limit=PAGE)
            if last is not None:
                if not page or page[0] != last:
                    self._lost(page[0].number if page else None)
                    return
                page = page[1:]
            for record in page:
                if not await self._take(record):
                    return
            if len(page) < PAGE - 1:
                break
        if self._state is not ProjectionState.FOLLOWING:
            self._log.info("following a stream", stream=self._stream, number=self.number)
        self._state = ProjectionState.FOLLOWING
        self._verified_at = self._clock()
        self._grown.set()

    async def _take(self, record: Record) -> bool:
        try:
            self._apply(record)
        except Exception as error:
            if self._state is not ProjectionState.REFUSED:
                self._log.error(
                    "a record cannot be applied; the state before it stays in force",
                    stream=self._stream,
                    number=record.number,
                    error=type(error).__name__,
                )
            self._state = ProjectionState.REFUSED
            return False
        await self._in_force(record)
        return True

    def _lost(self, found: int | None) -> None:
        if self._state is not ProjectionState.LOST:
            self._log.error(
                "the state store has lost records; the last good state stays in force, an operator decides",
                stream=self._stream,
                number=self.number,
                found="nothing there" if found is None else "another record of this number",
            )
        self._state = ProjectionState.LOST

    async def _keep_copy(self, copy: LocalCopy) -> None:
        while True:
            await self._grown.wait()
            self._grown.clear()
            try:
                await self._save(copy)
            except StateUnavailable:
                self._log.info("local copy not written: the store is away", stream=self._stream)
            except OSError as error:
                self._log.warning("local copy not written", file=str(copy.path), reason=type(error).__name__)
            await asyncio.sleep(COPY_S)

    async def _save(self, copy: LocalCopy) -> None:
        """Bring the file up to what is in force. Raises StateUnavailable, OSError."""
        while (head := await asyncio.to_thread(copy.head)) < self.number:
            # From the file's last record on, so that a file of another history is seen.
            page = await self._store.read(self._stream, after=max(head - 1, 0), limit=PAGE)
            page = [record for record in page if record.number <= self.number]
            if not page or page[-1].number <= head or not await asyncio.to_thread(copy.extend, page):
                self._log.warning("local copy is of another history and was left alone", file=str(copy.path))
                return
