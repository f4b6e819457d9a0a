"""A worker's answer on its way to the caller: in the transport's callback, or in the request's task."""

from collections.abc import Awaitable, Coroutine

from msgspec import Struct

from gateway.backends.port import DeltaSink
from gateway.backends.workers.answer import CompletionReader
from gateway.backends.workers.connection import Connection
from gateway.contracts.events import TAKEN, Delta


class PassingOn(Struct, eq=False):
    """Passes a worker's answer on, piece by piece: at once where nobody has to be waited for."""

    _connection: Connection
    _reader: CompletionReader
    _push: DeltaSink
    _error: Exception | None = None
    _flowing: bool = False
    # What has to be awaited, and the pieces after it.
    _waiting: tuple[Awaitable[None], list[Delta]] | None = None

    def take(self, data: bytes) -> bool:
        """Take a part of the answer; False when the rest is for :meth:`rest`."""
        reader, push = self._reader, self._push
        try:
            deltas = reader.feed(data)
            if reader.started and not self._flowing:
                self._flowing = True
                self._connection.flowing()
            for number, delta in enumerate(deltas, 1):
                sent = push(delta)
                if sent is not TAKEN:
                    self._waiting = sent, deltas[number:]
                    return False
        except Exception as error:
            self._error = error  # raised where the answer is awaited
            return False
        return not reader.done and reader.fault is None

    async def rest(self) -> None:
        """Wait for what could not be passed on at once, and pass the rest on. Raises what reading raised."""
        if self._error is not None:
            raise self._error
        if self._waiting is not None:
            (sent, deltas), self._waiting = self._waiting, None
            await sent
            for delta in deltas:
                await self._push(delta)
        self._reader.check()

    def close(self) -> None:
        """End what still waits to be passed on: its request was cancelled before its task had a turn."""
        if self._waiting is not None and isinstance(self._waiting[0], Coroutine):
            self._waiting[0].close()
        self._waiting = None
