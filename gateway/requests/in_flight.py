"""The registry of requests in flight, and the drain: not ready, then no new requests, then none in flight."""

import asyncio
from contextlib import AbstractContextManager
from types import TracebackType

from msgspec import Struct

from gateway.contracts.values import GenerateRequest
from gateway.errors import Draining, DuplicateRequest

# The tenant, whether the caller labelled the request, and the label or the gateway's own id.
_Key = tuple[str, bool, str]


class InFlightRequests:
    """Registers requests in flight, refuses duplicates, and drains; a drain cannot be undone.

    ``lame_duck_s``: seconds between *not ready* and *no new requests*: a load balancer notices at its next
    health check that it must stop sending, and requests that arrive until then are accepted.
    """

    def __init__(self, *, lame_duck_s: float = 0.0) -> None:
        self._lame_duck_s = lame_duck_s
        self._tasks: dict[_Key, asyncio.Task[object] | None] = {}
        self._cut: set[_Key] = set()
        self._reporting = 0
        self._empty = asyncio.Event()  # set while draining when nothing is in flight
        self._draining = asyncio.Event()
        self._closed = asyncio.Event()
        self._refusing = False  # equals `_closed`; a plain flag is cheaper for each request
        self._reported = _Reporting(self)

    @property
    def in_flight(self) -> int:
        """The number of requests between arrival and last byte."""
        return len(self._tasks) + self._reporting

    @property
    def draining(self) -> bool:
        return self._draining.is_set()

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def drain(self) -> None:
        """Begin the drain: not ready from now on; idempotent."""
        self._draining.set()
        if not self._lame_duck_s:
            self._close()

    def _close(self) -> None:
        self._refusing = True
        self._closed.set()

    async def until_draining(self) -> None:
        """Wait until the drain begins."""
        await self._draining.wait()

    async def run(self) -> None:
        """Refuse new requests ``lame_duck_s`` after the drain has begun."""
        await self.until_draining()
        await asyncio.sleep(self._lame_duck_s)
        self._close()

    def cut(self) -> None:
        """Refuse new requests and end those in flight with the error ``draining``; cancel each only once."""
        self._draining.set()
        self._close()
        for key, task in self._tasks.items():
            if task is not None and key not in self._cut:
                self._cut.add(key)
                task.cancel()

    def receive(self, request: GenerateRequest) -> AbstractContextManager[None]:
        """``with receive(request)``: the request is in flight while the block runs.

        Raises:
            Draining: on entry if the gateway is stopping; from the block if :meth:`cut` ended it.
            DuplicateRequest: on entry if the tenant has a request with this label in flight.
        """
        label = request.request_id if request.labelled else request.generation_id
        return _InFlight(self, (request.caller.tenant, request.labelled, label))

    def reporting(self) -> AbstractContextManager[None]:
        """``with reporting()``: a failed request counts as in flight until its error has been sent."""
        return self._reported

    def counted(self) -> AbstractContextManager[None]:
        """``with counted()``: work without a generation counts as in flight. Raises Draining."""
        if self._refusing:
            raise _draining()
        return self._reported

    def report(self, change: int) -> None:
        """Add ``change`` to the number of :meth:`reporting` and :meth:`counted` blocks."""
        self._reporting += change
        if self._refusing and not self._tasks and not self._reporting:
            self._empty.set()

    async def drained(self) -> None:
        """Wait until new requests are refused and none is in flight."""
        await self._closed.wait()
        while self.in_flight:
            self._empty.clear()
            await self._empty.wait()


class _Reporting(AbstractContextManager[None]):
    """A block that counts as in flight; one object serves all requests, because it has no state of them."""

    __slots__ = ("_requests",)

    def __init__(self, requests: InFlightRequests) -> None:
        self._requests = requests

    def __enter__(self) -> None:
        self._requests.report(1)

    def __exit__(self, *_: object) -> None:
        self._requests.report(-1)


class _InFlight(Struct, eq=False):
    """One request in flight."""

    _requests: InFlightRequests
    _key: _Key
    _task: asyncio.Task[object] | None = None
    _cancels_before: int = 0

    def __enter__(self) -> None:
        requests, key = self._requests, self._key
        if requests._refusing:
            raise _draining()
        if key in requests._tasks:
            raise DuplicateRequest("a request with this request_id is in flight", param="request_id")
        self._task = requests._tasks[key] = task = asyncio.current_task(asyncio.get_running_loop())
        self._cancels_before = 0 if task is None else task.cancelling()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        requests, key = self._requests, self._key
        del requests._tasks[key]
        if requests._refusing and not requests._tasks and not requests._reporting:
            requests._empty.set()
        if key in requests._cut and self._task is not None:
            requests._cut.discard(key)
            # Like asyncio.timeout: the own cancellation becomes an error, any other one stays.
            others = self._task.uncancel() > self._cancels_before
            if kind is asyncio.CancelledError and not others:
                raise _draining() from None


def _draining() -> Draining:
    return Draining("the gateway is stopping; send the request to another one", retry_after_ms=1000)
