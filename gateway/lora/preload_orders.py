"""Orders to all gateway processes to load an adapter now: records of the stream ``adapters-preload``.

An order is for the processes that run when it is sent, so old orders are deleted. A process that starts later
loads the pinned and most requested adapters. If an order is lost, the first request waits for the load.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import orjson
import structlog

from adapters.errors import AdapterError
from gateway.errors import GatewayError
from gateway.state.errors import StateError, StateUnavailable
from gateway.state.port import Record, StateStore
from resilience.failures import BackendFailure

STREAM: Final = "adapters-preload"
MAX_ORDERS: Final = 100  # most orders that are stored, and that one read returns


class AdapterOrders:
    """Sends orders to the other processes, and executes theirs, one after the other.

    ``me``: this process' unique name. ``load``: loads a version once this process' registry is at a number.
    ``head``: the number of the last known order; ``None`` until the stream was read.
    """

    def __init__(self, store: StateStore, *, me: str, load: Callable[[str, int], Awaitable[None]]) -> None:
        self._store = store
        self._me = me
        self._load = load
        self._log = structlog.get_logger("adapters")
        self.head: int | None = None
        self._done = 0
        self._ordered = asyncio.Event()
        store.listen(STREAM, self._on_head)

    async def send(self, adapter_id: str, number: int, *, author: str) -> bool:
        """Order to load a version that the registry has at ``number``; ``False`` if it could not be sent."""
        data = orjson.dumps({"load": adapter_id, "number": number, "by": self._me})
        try:
            record = await self._store.append(STREAM, data, author=author)
            if record.number > MAX_ORDERS:
                await self._store.forget(STREAM, record.number - MAX_ORDERS)
        except StateUnavailable as error:
            self._log.warning(
                "the order to load it was not sent to other gateways", adapter=adapter_id, reason=error.code
            )
            return False
        return True

    async def run(self) -> None:
        """Execute the other processes' orders, until cancelled."""
        while True:
            await self._ordered.wait()
            self._ordered.clear()
            try:
                records = await self._store.read(STREAM, after=self._done, limit=MAX_ORDERS)
            except StateError:
                continue  # the store notifies again when it is back
            for record in records:
                self._done = record.number
                await self._execute(record)

    def _on_head(self, head: int) -> None:
        """Note the stream's head; skip orders from before the first known head or a restart of the stream."""
        if self.head is None or head < self.head:
            self._done = head
        self.head = head
        if head > self._done:
            self._ordered.set()

    async def _execute(self, record: Record) -> None:
        try:
            order = orjson.loads(record.data)
            adapter_id, number, by = str(order["load"]), int(order["number"]), order["by"]
        except (KeyError, TypeError, ValueError):
            self._log.warning("an order for adapters is not understood", number=record.number)
            return
        if by == self._me:
            return
        try:
            await self._load(adapter_id, number)
        except (AdapterError, GatewayError, BackendFailure) as error:
            self._log.warning("adapter not loaded as ordered", adapter=adapter_id, reason=str(error))
