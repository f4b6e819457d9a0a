"""The time of each key's last use: exact in each process, published to the other processes in batches."""

import asyncio
from collections.abc import Callable
from itertools import islice

import msgspec
import structlog

from accounting.keys import MAX_KEYS
from gateway.state.errors import StateError
from gateway.state.port import Record, StateStore

STREAM = "keys-used"
AUTHOR = "gateway"
PUBLISH_EVERY_S = 60.0  # seconds between records in which a process publishes the use of its keys
# Seconds after which the use of a key is published again. Streams only grow, so a key in steady use adds 24
# entries a day, not 1,440.
KNOWN_FOR_S = 3_600.0
# The most keys of one record; at about 40 bytes each, the record stays far below the size limit.
MAX_PUBLISHED = 10_000


class KeyUse:
    """The last use of keys. Lives on the event loop."""

    def __init__(self, store: StateStore, *, unix_time: Callable[[], float]) -> None:
        self._store = store
        self._unix_time = unix_time
        self._log = structlog.get_logger("keys")
        self._here: dict[str, float] = {}
        self._everywhere: dict[str, float] = {}

    def record(self, key_id: str) -> None:
        self._here[key_id] = self._unix_time()

    def last(self, key_id: str) -> float | None:
        """Return the key's last known use in Unix seconds; other processes publish a use within an hour."""
        known = [times[key_id] for times in (self._here, self._everywhere) if key_id in times]
        return max(known, default=None)

    def forget(self, key_id: str) -> None:
        self._here.pop(key_id, None)
        self._everywhere.pop(key_id, None)

    def take(self, record: Record) -> None:
        """Apply a record of another process; raises nothing: an undecodable record is skipped."""
        try:
            published = msgspec.json.decode(record.data, type=dict[str, float])
        except msgspec.MsgspecError:
            self._log.warning("a record of keys' use is not understood", number=record.number)
            return
        for key_id, at in published.items():
            if key_id in self._everywhere or len(self._everywhere) < 2 * MAX_KEYS:
                self._everywhere[key_id] = max(at, self._everywhere.get(key_id, at))

    async def publish(self) -> None:
        """Append the due uses; if the store cannot be reached, the next call appends them."""
        fresh = (
            (key_id, at)
            for key_id, at in self._here.items()
            if at - self._everywhere.get(key_id, float("-inf")) >= KNOWN_FOR_S
        )
        due = dict(islice(fresh, MAX_PUBLISHED))
        if not due:
            return
        try:
            await self._store.append(STREAM, msgspec.json.encode(due), author=AUTHOR)
        except StateError as error:
            self._log.info("keys' use is not published yet", reason=error.code)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(PUBLISH_EVERY_S)
            await self.publish()
