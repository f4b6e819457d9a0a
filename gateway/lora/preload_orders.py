"""Orders to load an adapter now, for every gateway process: a word in the stream ``adapters-preload``.

An order is for whoever runs when it is given. It is no part of the registry: who starts later loads what is
pinned and hot, so old orders are forgotten, and a lost one costs the first request a load.
"""

from __future__ import annotations

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
MAX_ORDERS: Final = 100
"""Orders that are kept, and that one look reads: more than anybody gives between two looks."""


class AdapterOrders:
    """Gives orders to the other processes, and carries theirs out, one after the other.

    Args:
        store: where the stream is.
        me: this process' name among all.
        load: loads a registered version in this process, once the registry is at this number.

    ``head`` is the last order that this process heard of; ``None`` until it has heard of the stream.
    """

    def __init__(self, store: StateStore, *, me: str, load: Callable[[str, int], Awaitable[None]]) -> None:
        self._store = store
        self._me = me
        self._load = load
        self._log = structlog.get_logger("adapters")
        self.head: int | None = None
        self._done = 0
        self._news = asyncio.Event()
        store.listen(STREAM, self._hear)

    async def tell(self, adapter_id: str, number: int, *, author: str) -> bool:
        """Have every other process load a version of the registry's ``number``; whether they were told."""
        data = orjson.dumps({"load": adapter_id, "number": number, "by": self._me})
        try:
            record = await self._store.append(STREAM, data, author=author)
            if record.number > MAX_ORDERS:
                await self._store.forget(STREAM, record.number - MAX_ORDERS)
        except StateUnavailable as error:
            self._log.warning(
                "other gateways were not told to load it", adapter=adapter_id, reason=error.code
            )
            return False
        return True

    async def run(self) -> None:
        """Carry out what others order, until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                records = await self._store.read(STREAM, after=self._done, limit=MAX_ORDERS)
            except StateError:
                continue  # the store tells again when it is back
            for record in records:
                self._done = record.number
                await self._carry_out(record)

    def _hear(self, head: int) -> None:
        """What was ordered before this process heard of the stream is not for it; a stream may begin anew."""
        if self.head is None or head < self.head:
            self._done = head
        self.head = head
        if head > self._done:
            self._news.set()

    async def _carry_out(self, record: Record) -> None:
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
