"""Keeps the engines' own token counters hour by hour, so that the ledger can be compared with them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from accounting.errors import LedgerUnavailable
from accounting.values import HOUR_S, EngineCount

# A reading in memory costs some microseconds; what is counted in the 10 s around a full hour may fall on
# either side of it.
READ_S = 10.0
# Readings between two writes: the database keeps one line an engine and hour.
READS_A_WRITE = 6
# Longest that the last write may take when the gateway stops.
LAST_WRITE_S = 1.0

Engine = tuple[str, str]
Counted = Mapping[Engine, tuple[int, int]]


@dataclass(slots=True)
class _Hour:
    prompt_tokens: int = 0
    generation_tokens: int = 0
    covered_s: float = 0.0


class HourlyCounts:
    """Differences of counters, by hour. Sans-I/O: a reading and its time in, lines for the table out.

    A counter that has gone back belongs to an engine that was started anew, and counts from 0.

    Args:
        observer: names this process in the table.
        begun: engines of this process, whose counters are known to have begun at 0 with it.
    """

    def __init__(self, observer: str, begun: Sequence[Engine] = ()) -> None:
        self._observer = observer
        self._last: dict[Engine, tuple[int, int]] = dict.fromkeys(begun, (0, 0))
        self._at: dict[Engine, float] = {}
        self._hours: dict[tuple[int, Engine], _Hour] = {}

    def saw(self, counted: Counted, unix_s: float) -> None:
        """Take a reading."""
        hour = int(unix_s // HOUR_S)
        for engine in self._last:
            self._at.setdefault(engine, unix_s)  # an engine of one's own is watched before it tells
        for engine, now in counted.items():
            last = self._last.get(engine)
            if last is not None:
                kept = self._hours.setdefault((hour, engine), _Hour())
                kept.prompt_tokens += _grown(last[0], now[0])
                kept.generation_tokens += _grown(last[1], now[1])
                kept.covered_s += max(0.0, unix_s - self._at.get(engine, unix_s))
            self._last[engine] = now
            self._at[engine] = unix_s

    def lines(self) -> list[EngineCount]:
        """All that was seen of hours that are not given up; writing them again changes nothing."""
        return [
            EngineCount(
                hour, engine[0], engine[1], self._observer, kept.prompt_tokens, kept.generation_tokens,
                kept.covered_s,
            )
            for (hour, engine), kept in self._hours.items()
        ]  # fmt: skip

    def written(self, unix_s: float) -> None:
        """The lines are in the table: give up hours that are over."""
        hour = int(unix_s // HOUR_S)
        self._hours = {place: kept for place, kept in self._hours.items() if place[0] >= hour}


class EngineCounts:
    """The loop around :class:`HourlyCounts`.

    Args:
        counts: keeps them.
        read: the counters now, by backend and engine; must neither block nor raise.
        write: puts lines into the table; raises LedgerUnavailable when that cannot be done now.
        unix_time: seconds since 1970.
    """

    def __init__(
        self,
        counts: HourlyCounts,
        *,
        read: Callable[[], Counted],
        write: Callable[[Sequence[EngineCount]], Awaitable[None]],
        unix_time: Callable[[], float],
    ) -> None:
        self._counts = counts
        self._read = read
        self._write = write
        self._unix_time = unix_time

    async def run(self) -> None:
        """Read and write until cancelled, and once more then."""
        try:
            while True:
                for _ in range(READS_A_WRITE):
                    self._counts.saw(self._read(), self._unix_time())
                    await asyncio.sleep(READ_S)
                await self.write()
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WRITE_S):
                    await self.write()

    async def write(self) -> None:
        """Read once more and write; what a database that is away does not take is written later."""
        now = self._unix_time()
        self._counts.saw(self._read(), now)
        lines = self._counts.lines()
        try:
            await self._write(lines)
        except LedgerUnavailable:
            return  # the ledger tells of it; the lines are kept
        self._counts.written(now)


def _grown(last: int, now: int) -> int:
    return now - last if now >= last else now
