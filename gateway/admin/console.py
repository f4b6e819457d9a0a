"""What the console shows of this process: its present state, and its last requests."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from typing_extensions import TypedDict

from gateway.state.audit import Audit
from observability.events import RequestRecord

KEPT: Final = 2_000
"""Requests that can be looked at."""
FRESH_S: Final = 1.5
"""One aggregate serves every console that asks within this time."""
PAUSE_S: Final = 2.0
"""Pause of a live view between two aggregates."""
MOST_STREAMS: Final = 64
"""Live views that are open at one process at a time."""
LISTED: Final = 12
"""Requests of the live view."""


class FinishedRequest(TypedDict):
    """One request of a list."""

    at: float
    request_id: str
    tenant: str | None
    contract: str
    route: str | None
    model: str | None
    backend: str | None
    status: int
    error_code: str | None
    fallback: str | None
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    queue_wait_ms: float | None
    ttft_ms: float | None
    total_ms: float


class RequestsBody(TypedDict):
    """The last requests, newest first."""

    requests: list[FinishedRequest]


class ConsoleAdmin:
    """Answers from memory alone.

    Args:
        admission: the gates, as operators see them.
        figures: of the last minute.
        backends: each with its state and load.
    """

    def __init__(
        self,
        *,
        admission: Callable[[], Mapping[str, Any]],
        figures: Callable[[], Mapping[str, Any]],
        backends: Callable[[], Sequence[Mapping[str, Any]]],
        audit: Audit,
        name: str,
        clock: Callable[[], float],
        unix_time: Callable[[], float],
        pause_s: float = PAUSE_S,
        most_streams: int = MOST_STREAMS,
    ) -> None:
        self._admission = admission
        self._figures = figures
        self._backends = backends
        self._audit = audit
        self._name = name
        self._clock = clock
        self._unix_time = unix_time
        self._kept: deque[tuple[float, RequestRecord]] = deque(maxlen=KEPT)
        self.pause_s, self.most_streams = pause_s, most_streams
        self.streams = 0  # open live views
        self._live: dict[str, Any] = {}
        self._live_at = float("-inf")

    def saw(self, record: RequestRecord) -> None:
        """A request has ended."""
        self._kept.append((self._unix_time(), record))

    def live(self) -> Mapping[str, Any]:
        """This process now."""
        if self._clock() - self._live_at >= FRESH_S:
            self._live_at = self._clock()
            shown = self._admission()
            self._live = {
                "at": self._unix_time(),
                "gateway": self._name,
                "figures": dict(self._figures()),
                "backends": [dict(one) for one in self._backends()],
                "gates": shown["backends"],
                "decisions": shown["decisions"][:LISTED],
                "requests": [_line(at, record) for at, record in list(self._kept)[: -LISTED - 1 : -1]],
            }
        return self._live

    def requests(self, *, text: str | None, errors: bool, limit: int) -> RequestsBody:
        """The last ones whose id, tenant, model, route, backend or error is ``text``, or begins with it."""
        found = []
        for at, record in reversed(self._kept):
            if errors and not record.error_code and record.status < 400:
                continue
            if text is not None and not any((one or "").startswith(text) for one in _names(record)):
                continue
            found.append(_line(at, record))
            if len(found) == limit:
                break
        return {"requests": found}

    def request(self, request_id: str) -> Mapping[str, Any] | None:
        """All that is known of a request; its texts are not."""
        for at, record in reversed(self._kept):
            if request_id in (record.request_id, record.generation_id, record.trace_id):
                shown: dict[str, Any] = msgspec.to_builtins(record)
                return {"at": at, **shown}
        return None

    async def signed_in(self, who: str, address: str) -> None:
        """A key was exchanged for a session."""
        await self._audit.record(who, "console.sign_in", address or "unknown address")


def _names(record: RequestRecord) -> tuple[str | None, ...]:
    return (
        record.request_id,
        record.generation_id,
        record.trace_id,
        record.tenant,
        record.model,
        record.route,
        record.backend_name,
        record.error_code,
    )


def _line(at: float, record: RequestRecord) -> FinishedRequest:
    return {
        "at": at,
        "request_id": record.request_id,
        "tenant": record.tenant,
        "contract": record.contract,
        "route": record.route,
        "model": record.model,
        "backend": record.backend_name,
        "status": record.status,
        "error_code": record.error_code,
        "fallback": record.fallback_kind,
        "input_tokens": record.input_tokens,
        "output_tokens": record.output_tokens,
        "cached_tokens": record.cached_tokens,
        "queue_wait_ms": record.queue_wait_ms,
        "ttft_ms": record.ttft_ms,
        "total_ms": record.total_ms,
    }
