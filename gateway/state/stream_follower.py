"""Follows one stream: applies each record once, in order, from a local copy while the store is unreachable.

Each read begins at the last applied record. If that record is missing or different, the store has lost
records that this process has applied (a Redis that lost its disk, a file restored from a backup). Then
nothing is applied or undone: the last good state stays in force, ``state`` is ``LOST``, an error is logged,
and an operator decides (``docs/state.md``).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from accounting.events import error_kind
from gateway.state.errors import StateUnavailable
from gateway.state.local_copy import LocalCopy
from gateway.state.port import Record, StateStore
from gateway.state.projection import START_TIMEOUT_S, ProjectionState, StreamProjection

PAGE = 100
VERIFY_S = 10.0  # seconds between comparisons of a stream that does not grow with the last applied record
COPY_S = 1.0  # seconds between writes of the local copy, which wait for the disk


class StreamFollower(StreamProjection):
    """Applies a stream's records to a projection.

    Args:
        store: holds the stream; its ``run`` must be running.
        apply: receives each record in order, exactly once; must not block. If it raises, it must have
            changed nothing; the follower stops before that record, and passes it again later.
        copy: the local copy; ``None``: nothing is in force until the store is reached.
        prepare: does beforehand what takes long of applying a record, and returns whether the record is a
            complete state that can be used: records before it that are read with it are then not applied.
            Must not raise.
        informational: nothing is decided by the records, and applying one again changes nothing: if the store
            has lost some, the follower reads those that it has from the beginning.
    """

    def __init__(
        self,
        store: StateStore,
        stream: str,
        apply: Callable[[Record], None],
        *,
        copy: LocalCopy | None,
        clock: Callable[[], float],
        prepare: Callable[[Record], Awaitable[bool]] | None = None,
        informational: bool = False,
    ) -> None:
        super().__init__(store, stream, apply)
        self._prepare = prepare
        self._informational = informational
        self._copy = copy
        self._clock = clock
        self._verified_at: float | None = None
        self._grown = asyncio.Event()

    async def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Apply the local copy's records, and then newer ones of the store.

        If the store does not answer within ``timeout_s``, a warning is logged and ``run`` catches up later.
        """
        if self._copy is not None:
            await self._take_all(await asyncio.to_thread(self._copy.load))
        try:
            async with asyncio.timeout(timeout_s):
                await self._catch_up()
        except (StateUnavailable, TimeoutError):
            what = "the local copy is in force" if self.number else "there is no local copy"
            self._log.warning(
                f"state store unreachable at the start; {what}", stream=self.stream, number=self.number
            )

    async def run(self) -> None:
        async with asyncio.TaskGroup() as loops:
            loops.create_task(super().run(), name=f"follow-{self.stream}")
            if self._copy is not None:
                loops.create_task(self._write_copy(self._copy), name=f"copy-{self.stream}")

    def _must_verify(self) -> bool:
        return self._verified_at is None or self._clock() - self._verified_at >= VERIFY_S

    async def _catch_up(self) -> None:
        while True:
            last = self._last
            page = await self._store.read(self.stream, after=max(self.number - 1, 0), limit=PAGE)
            if last is not None:
                if not page or page[0] != last:
                    if self._informational:
                        self._last = None
                        continue
                    self._lost("another record of this number" if page else "nothing there")
                    return
                page = page[1:]
            if not await self._take_all(page):
                return
            if len(page) < PAGE - 1:
                break
        if self.state is not ProjectionState.FOLLOWING:
            self._log.info("following a stream", stream=self.stream, number=self.number)
        self.state = ProjectionState.FOLLOWING
        self._verified_at = self._clock()
        self._grown.set()

    async def _take_all(self, records: Sequence[Record]) -> bool:
        """Apply records, from the last one that is a complete state; ``False`` if one cannot be applied."""
        if self._prepare is not None:
            for index in reversed(range(1, len(records))):
                if await self._prepare(records[index]):
                    records = records[index:]
                    break
        for record in records:
            if not await self._take(record):
                return False
        return True

    async def _take(self, record: Record) -> bool:
        if self._prepare is not None:
            await self._prepare(record)
        try:
            self._apply(record)
        except Exception as error:
            if self.state is not ProjectionState.REFUSED:
                self._log.error(
                    "a record cannot be applied; the state before it stays in force",
                    stream=self.stream,
                    number=record.number,
                    error=type(error).__name__,
                )
            self.state = ProjectionState.REFUSED
            return False
        await self._in_force(record)
        return True

    async def _write_copy(self, copy: LocalCopy) -> None:
        while True:
            await self._grown.wait()
            self._grown.clear()
            try:
                await self._save(copy)
            except StateUnavailable:
                self._log.info("local copy not written: the store is unreachable", stream=self.stream)
            except OSError as error:
                self._log.warning("local copy not written", file=str(copy.path), reason=error_kind(error))
            await asyncio.sleep(COPY_S)

    async def _save(self, copy: LocalCopy) -> None:
        """Add the applied records to the file, which is written once. Raises StateUnavailable, OSError."""
        head, number = await asyncio.to_thread(copy.head), self.number
        if head >= number:
            return
        # Read from the file's last record on, so that a file with another history is detected.
        records, last = list[Record](), max(head - 1, 0)
        while last < number and (page := await self._store.read(self.stream, after=last, limit=PAGE)):
            records += [record for record in page if record.number <= number]
            last = page[-1].number
        if last < number or not await asyncio.to_thread(copy.extend, records):
            self._log.warning("local copy is of another history and was left alone", file=str(copy.path))
