"""Forwards an answer to the caller: in the callback where its pieces arrive, or in the request's task."""

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

from gateway.backends.port import DeltaSink
from gateway.contracts.events import TAKEN, Delta

T_contra = TypeVar("T_contra", contravariant=True)


class AnswerReader(Protocol[T_contra]):
    """Converts received data to the deltas of one answer."""

    @property
    def started(self) -> bool:
        """Whether the first part of an answer was read."""

    @property
    def done(self) -> bool:
        """Whether the last part of the answer was read."""

    @property
    def fault(self) -> Exception | None:
        """Why nothing more can be read."""

    def feed(self, data: T_contra, /) -> Sequence[Delta]:
        """The deltas that ``data`` completes."""


class DeltaForwarder(Struct, Generic[T_contra], eq=False):
    """Forwards an answer, delta by delta: at once unless the sink must be awaited.

    Args:
        on_start: called once, when the answer has started.
        on_delta: called once, before the first delta is forwarded.

    ``delivered``: whether the sink got a delta.
    """

    _reader: AnswerReader[T_contra]
    _push: DeltaSink
    _on_start: Callable[[], object]
    _on_delta: Callable[[], object] | None = None
    _error: Exception | None = None
    delivered: bool = False
    _started: bool = False
    # The sink's awaitable, and the deltas after it.
    _waiting: tuple[Awaitable[None], Sequence[Delta]] | None = None

    def take(self, data: T_contra) -> bool:
        """Take a part of the answer; returns False when :meth:`rest` must be awaited."""
        reader, push = self._reader, self._push
        try:
            deltas = reader.feed(data)
            if not self._started and reader.started:
                self._started = True
                self._on_start()
            if deltas and not self.delivered:
                self.delivered = True
                if self._on_delta is not None:
                    self._on_delta()
            following = iter(deltas)
            for delta in following:
                sent = push(delta)
                if sent is not TAKEN:
                    self._waiting = sent, list(following)
                    return False
        except Exception as error:
            self._error = error  # raised where the answer is awaited
            return False
        return not reader.done and reader.fault is None

    async def rest(self) -> None:
        """Await the sink, and forward the remaining deltas. Raises the error that stopped :meth:`take`."""
        if self._error is not None:
            raise self._error
        if self._waiting is not None:
            (sent, deltas), self._waiting = self._waiting, None
            await sent
            for delta in deltas:
                await self._push(delta)
        if self._reader.fault is not None:
            raise self._reader.fault

    def close(self) -> None:
        """Close an awaitable of the sink that was not awaited: its request was cancelled before its turn."""
        if self._waiting is not None and isinstance(self._waiting[0], Coroutine):
            self._waiting[0].close()
        self._waiting = None
