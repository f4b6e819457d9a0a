"""The data of the console: this process's current state and last requests, and the fleet's gateways.

While a live view is open, its gateway announces its summary through the state store, and asks the other
gateways for theirs. Announcements are not stored, and none are sent while no view is open.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from operator import attrgetter
from typing import Any, Final

import msgspec
from typing_extensions import TypedDict

from gateway.contracts.fields import from_attributes
from gateway.state.audit import Audit
from gateway.state.port import StateStore
from observability.collectors import WorkerStatus
from observability.events import RequestRecord
from observability.slo_metrics import SloTargets, targets_met

KEPT: Final = 2_000  # the number of last requests that are kept
FRESH_S: Final = 1.5  # seconds for which one aggregate is returned to all consoles
PAUSE_S: Final = 2.0  # seconds between two aggregates of a live view
MOST_STREAMS: Final = 64  # the most live views that are open in one process at a time
LISTED: Final = 12  # the number of requests, and of decisions, in the live view
STREAM: Final = "console"  # the stream name under which gateways announce their summaries
GONE_S: Final = 8.0
"""Seconds since its last summary after which a gateway is shown as gone: it missed 3 or 4 announcements."""
MOST_GATEWAYS: Final = 64
"""The most gateways that are remembered; beyond it the one with the oldest announcement is dropped."""
MOST_SUMMARY: Final = 4_096  # longest announcement that is read, in characters
RECENT_S: Final = 60.0  # requests that ended within this many seconds count for the routes' targets
MOST_ROUTES: Final = 50  # the most routes in the live view


class GatewaySummary(msgspec.Struct, frozen=True):
    """A gateway's announcement; ``asks``: it has an open live view, so the others announce theirs.

    Counts of failures are those of the last minute.
    """

    gateway: str
    asks: bool
    version: str
    in_flight: int
    waiting: int
    requests_per_second: float
    errors: int
    fallbacks: int
    refused: int
    ttft_ms_p50: float | None = None
    ttft_ms_p99: float | None = None
    tpot_ms_p50: float | None = None
    tpot_ms_p99: float | None = None


class RouteTargets(TypedDict):
    """A route's last minute compared with its targets; shares are ``None`` without a counted request.

    ``goodput`` is the number of requests per second that met both targets.
    """

    route: str
    ttft_target_ms: float
    total_target_ms: float
    requests: int
    ttft_met: float | None
    total_met: float | None
    goodput: float


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


@dataclass(eq=False, kw_only=True)
class ConsoleAdmin:
    """Answers from memory only. :meth:`run` announces this gateway to others while a live view is open.

    Args:
        admission: returns the gates, as operators see them.
        in_flight: returns the number of requests that callers wait for, those that wait in queues included.
        figures: returns the figures of the last minute.
        backends: returns the backends with their states and loads.
        workers: returns the workers of each pool.
        targets: returns the service levels in force, by route.
        store: the store through which gateways announce themselves.
    """

    admission: Callable[[], Mapping[str, Any]]
    in_flight: Callable[[], int]
    figures: Callable[[], Mapping[str, Any]]
    backends: Callable[[], Sequence[Mapping[str, Any]]]
    workers: Callable[[], Mapping[str, Sequence[WorkerStatus]]]
    targets: Callable[[], Mapping[str, SloTargets]]
    store: StateStore
    audit: Audit
    name: str
    version: str
    clock: Callable[[], float]
    unix_time: Callable[[], float]

    def __post_init__(self) -> None:
        self._recent_requests: deque[tuple[float, RequestRecord]] = deque(maxlen=KEPT)
        self.pause_s, self.most_streams = PAUSE_S, MOST_STREAMS
        self.streams = 0  # open live views
        self._made: tuple[GatewaySummary, Mapping[str, Any]]
        self._made_at = float("-inf")
        # By gateway: when its last summary arrived (this process's monotonic and Unix time), and the summary.
        self._others: dict[str, tuple[float, float, GatewaySummary]] = {}
        self._asks = False
        self._due = asyncio.Event()
        self.store.on_announcement(STREAM, self._announced)

    def observe(self, record: RequestRecord) -> None:
        self._recent_requests.append((self.unix_time(), record))

    async def run(self) -> None:
        """Announce this gateway at most every ``pause_s`` while a live view is open, here or elsewhere."""
        while True:
            await self._due.wait()
            self._due.clear()
            asks, self._asks = self._asks, False
            summary = msgspec.structs.replace(self._aggregate()[0], asks=asks)
            await self.store.announce(STREAM, msgspec.json.encode(summary).decode())
            await asyncio.sleep(self.pause_s)

    def _announced(self, text: str) -> None:
        """Store the announcement of a gateway, which may be this one or of another version."""
        if len(text) > MOST_SUMMARY:
            return
        try:
            summary = msgspec.json.decode(text, type=GatewaySummary)
        except msgspec.DecodeError:
            return
        if summary.gateway == self.name:
            return
        self._others.pop(summary.gateway, None)  # so that the order is that of the last announcement
        self._others[summary.gateway] = (self.clock(), self.unix_time(), summary)
        if len(self._others) > MOST_GATEWAYS:
            del self._others[next(iter(self._others))]
        if summary.asks:
            self._due.set()

    def _summary(self, gates: Mapping[str, Any], figures: Mapping[str, Any]) -> GatewaySummary:
        running = sum(gate["in_flight"]["requests"] for gate in gates.values())
        waiting = sum(gate["queue"]["requests"] for gate in gates.values())
        return GatewaySummary(
            self.name,
            False,
            self.version,
            # Gates lack the requests that wait for a backend to come back; callers lack mirrored requests.
            max(running, self.in_flight() - waiting),
            waiting,
            *(figures[name] for name in _COUNTED),
            *(figures[name] for name in _TIMED),
        )

    def _fleet(self, own: GatewaySummary) -> list[dict[str, Any]]:
        now = self.clock()
        known = [(now, self.unix_time(), own), *self._others.values()]
        return [
            {**msgspec.to_builtins(one), "at": at, "gone": now - arrived_at > GONE_S}
            for arrived_at, at, one in sorted(known, key=lambda entry: entry[2].gateway)
        ]

    def live(self) -> Mapping[str, Any]:
        """Return this process's current state, and the last announcements of the other gateways."""
        self._asks = True
        self._due.set()
        return self._aggregate()[1]

    def _aggregate(self) -> tuple[GatewaySummary, Mapping[str, Any]]:
        if self.clock() - self._made_at >= FRESH_S:
            self._made_at, now = self.clock(), self.unix_time()
            shown, figures, recent = self.admission(), self.figures(), list(self._recent(now))
            own = self._summary(shown["backends"], figures)
            self._made = (
                own,
                {
                    "at": now,
                    "gateway": self.name,
                    "fleet": self._fleet(own),
                    "figures": dict(figures),
                    "targets": _against(self.targets(), recent),
                    "backends": [dict(one) for one in self.backends()],
                    "workers": [
                        {"pool": pool, **asdict(one)}
                        for pool, found in self.workers().items()
                        for one in found
                    ],
                    "prefix_hits": _prefix_hits(recent),
                    "gates": shown["backends"],
                    "decisions": shown["decisions"][:LISTED],
                    "requests": [
                        _line(at, record) for at, record in list(self._recent_requests)[: -LISTED - 1 : -1]
                    ],
                },
            )
        return self._made

    def _recent(self, now: float) -> Iterable[RequestRecord]:
        """Yield the requests of the last minute, newest first."""
        for at, record in reversed(self._recent_requests):
            if now - at > RECENT_S:
                return
            yield record

    def requests(self, *, text: str | None, errors: bool, limit: int) -> RequestsBody:
        """Return the requests whose id, tenant, key, model, route, backend or error begins with ``text``."""
        found = (
            _line(at, record)
            for at, record in reversed(self._recent_requests)
            if (not errors or record.error_code or record.status >= 400)
            and (text is None or any((one or "").startswith(text) for one in _names(record)))
        )
        return {"requests": list(islice(found, limit))}

    def request(self, request_id: str) -> Mapping[str, Any] | None:
        """Return the record of a request, which has no texts; ``None`` if it is not kept."""
        for at, record in reversed(self._recent_requests):
            if request_id in (record.request_id, record.generation_id, record.trace_id):
                shown: dict[str, Any] = msgspec.to_builtins(record)
                return {"at": at, **shown}
        return None

    async def signed_in(self, who: str, address: str) -> None:
        """Audit that a key was exchanged for a session."""
        await self.audit.record(who, "console.sign_in", address or "unknown address")


_names = attrgetter(
    *("request_id", "generation_id", "trace_id", "tenant", "key_id"),
    *("model", "route", "backend_name", "error_code"),
)
_COUNTED = ("requests_per_second", "errors_last_minute", "fallbacks_last_minute", "shed_last_minute")
_TIMED = ("ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99")


def _against(targets: Mapping[str, SloTargets], recent: Iterable[RequestRecord]) -> list[RouteTargets]:
    """Compare each used route with its targets."""
    verdicts: dict[str, list[tuple[bool | None, bool | None]]] = {}
    for record in recent:
        if record.route is not None and record.route in targets:
            verdicts.setdefault(record.route, []).append(targets_met(record, targets[record.route]))
    return [
        {
            "route": route,
            "ttft_target_ms": targets[route].ttft_ms,
            "total_target_ms": targets[route].total_ms,
            "requests": len(found),
            "ttft_met": _share([first for first, _ in found]),
            "total_met": _share([whole for _, whole in found]),
            "goodput": round(sum(first is True and whole is True for first, whole in found) / RECENT_S, 3),
        }
        for route, found in sorted(verdicts.items())[:MOST_ROUTES]
    ]


def _share(verdicts: Iterable[bool | None]) -> float | None:
    counted = [one for one in verdicts if one is not None]
    return sum(counted) / len(counted) if counted else None


def _prefix_hits(recent: Iterable[RequestRecord]) -> dict[str, float]:
    """Return, by backend, the share of input tokens that were cached."""
    tokens: dict[str, tuple[int, int]] = {}
    for record in recent:
        if record.backend_name is not None and record.input_tokens:
            cached, all_ = tokens.get(record.backend_name, (0, 0))
            tokens[record.backend_name] = (cached + record.cached_tokens, all_ + record.input_tokens)
    return {name: cached / all_ for name, (cached, all_) in tokens.items()}


def _line(at: float, record: RequestRecord) -> FinishedRequest:
    return from_attributes(
        FinishedRequest, record, at=at, backend=record.backend_name, fallback=record.fallback_kind
    )
