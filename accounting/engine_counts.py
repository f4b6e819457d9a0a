"""Stores the engines' own token counters by hour, so that the ledger can be compared with them."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from accounting.errors import LedgerUnavailable
from accounting.values import HOUR_S, EngineCount

# Seconds between readings. A reading costs some microseconds; tokens of the 10 s around a full hour may count
# for either hour.
READ_S = 10.0
READS_A_WRITE = 6  # readings between two writes; the database has one line per engine, hour and observer
LAST_WRITE_S = 1.0  # longest duration of the last write, when the gateway stops

Engine = tuple[str, str]
Readings = Mapping[Engine, tuple[int, int]]


class HourlyCounts:
    """Growth of the counters by hour; ``observer`` is the column that names this process. A counter that has
    decreased belongs to a restarted engine and counts from 0; ``own`` engines start at 0 with this process.
    """

    def __init__(self, observer: str, own: Sequence[Engine] = ()) -> None:
        self._observer = observer
        self._last: dict[Engine, tuple[int, int]] = dict.fromkeys(own, (0, 0))
        self._at: dict[Engine, float] = {}
        self._hours: dict[tuple[int, Engine], EngineCount] = {}

    def record(self, readings: Readings, unix_s: float, clock_s: float) -> None:
        """Count the growth since the last readings in the hour of ``unix_s``. The time that was covered is
        measured by ``clock_s``, which does not jump.
        """
        hour = int(unix_s // HOUR_S)
        for engine in self._last:
            self._at.setdefault(engine, clock_s)  # an own engine is observed from the start
        for engine, now in readings.items():
            last = self._last.get(engine)
            if last is not None:
                found = self._hours.get((hour, engine)) or EngineCount(hour, *engine, self._observer)
                self._hours[hour, engine] = replace(
                    found,
                    prompt_tokens=found.prompt_tokens + _grown(last[0], now[0]),
                    generation_tokens=found.generation_tokens + _grown(last[1], now[1]),
                    covered_s=found.covered_s + clock_s - self._at.get(engine, clock_s),
                )
            self._last[engine] = now
            self._at[engine] = clock_s

    def lines(self) -> list[EngineCount]:
        """The lines of all hours in memory; writing the same line twice changes nothing."""
        return list(self._hours.values())

    def written(self, unix_s: float) -> None:
        """Drop past hours after their lines were written."""
        hour = int(unix_s // HOUR_S)
        self._hours = {place: found for place, found in self._hours.items() if place[0] >= hour}


@dataclass(frozen=True, slots=True, eq=False)
class EngineCounts:
    """Reads the counters at intervals and writes them. ``read`` must neither block nor raise;
    ``write_lines`` raises LedgerUnavailable.
    """

    counts: HourlyCounts
    read: Callable[[], Readings]
    write_lines: Callable[[Sequence[EngineCount]], Awaitable[None]]
    unix_time: Callable[[], float]
    clock: Callable[[], float]

    async def run(self) -> None:
        """Read and write until cancelled, then write once more."""
        try:
            while True:
                for _ in range(READS_A_WRITE):
                    self.counts.record(self.read(), self.unix_time(), self.clock())
                    await asyncio.sleep(READ_S)
                await self.write()
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WRITE_S):
                    await self.write()

    async def write(self) -> None:
        """Read and write; when the database is unavailable, the lines stay in memory for the next write."""
        now = self.unix_time()
        self.counts.record(self.read(), now, self.clock())
        lines = self.counts.lines()
        try:
            await self.write_lines(lines)
        except LedgerUnavailable:
            return  # the ledger reports it; the lines stay
        self.counts.written(now)


def _grown(last: int, now: int) -> int:
    return now - last if now >= last else now
