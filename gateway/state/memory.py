"""The fake: streams in memory, which several stores can share as processes share a file or Redis."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from weakref import WeakSet

from gateway.state.errors import Conflict, StateUnavailable
from gateway.state.port import MAX_READ, POLL_S, Record, StateStore, check_size


class MemoryStreams:
    """The shared records; ``down`` makes every store fail, ``full`` every append."""

    def __init__(self) -> None:
        self.records: dict[str, list[Record]] = {}
        self.forgotten: Counter[str] = Counter()
        self.stores: WeakSet[MemoryStateStore] = WeakSet()
        self.down = False
        self.full = False


class MemoryStateStore(StateStore):
    """A store for tests and for ``memory://``: its records are lost when the process ends.

    ``streams`` are the records that stores share; by default the store has its own.
    """

    def __init__(
        self,
        streams: MemoryStreams | None = None,
        *,
        unix_time: Callable[[], float],
        poll_s: float = POLL_S,
    ) -> None:
        super().__init__("memory://", unix_time, poll_s)
        self._streams = streams if streams is not None else MemoryStreams()
        self._streams.stores.add(self)

    async def close(self) -> None:
        self._streams.stores.discard(self)

    async def append(self, stream: str, data: bytes, *, author: str, expected: int | None = None) -> Record:
        check_size(stream, data)
        self._check("append")
        if self._streams.full:
            raise StateUnavailable("append", "full", writes_refused=True)
        records = self._streams.records.setdefault(stream, [])
        head = self._streams.forgotten[stream] + len(records)
        if expected is not None and expected != head:
            raise Conflict(stream, expected, head)
        record = Record(stream, head + 1, self._unix_time(), author, data)
        records.append(record)
        for store in list(self._streams.stores):
            store._notify(stream, record.number)
        return record

    async def read(
        self, stream: str, *, after: int = 0, limit: int = MAX_READ, newest_first: bool = False
    ) -> Sequence[Record]:
        self._check("read")
        first = max(0, after - self._streams.forgotten[stream])
        records = self._streams.records.get(stream, [])[first:]
        return records[-limit:][::-1] if newest_first else records[:limit]

    async def forget(self, stream: str, up_to: int) -> None:
        self._check("forget")
        records = self._streams.records.get(stream, [])
        gone = min(max(0, up_to - self._streams.forgotten[stream]), len(records))
        del records[:gone]
        self._streams.forgotten[stream] += gone

    async def heads(self) -> Mapping[str, int]:
        self._check("heads")
        forgotten, records = self._streams.forgotten, self._streams.records
        return {name: head for name in records if (head := forgotten[name] + len(records[name]))}

    async def announce(self, stream: str, text: str) -> None:
        if not self._streams.down:
            for store in list(self._streams.stores):
                store._announced(stream, text)

    def _check(self, operation: str) -> None:
        if self._streams.down:
            self._failed(operation, "down")
            raise StateUnavailable(operation, "down")
        self._reached()
