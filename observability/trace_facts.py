"""Facts of a trace that the request's record lacks, built only for sampled traces; and the sampling."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from budgeting.values import Message
from observability.events import RequestRecord
from observability.trace_steps import TraceStep

# The sampling settings with the conventions' names.
SAMPLING_NAMES = ("max_tokens", "temperature", "top_p", "top_k", "seed")


@dataclass(frozen=True, slots=True)
class Content:
    """The texts of a request on a route that opted in; ``answers``: one for each choice."""

    messages: tuple[Message, ...]
    answers: tuple[Message, ...]

    @property
    def chars(self) -> int:
        return sum(len(text) for one in (*self.messages, *self.answers) for text in one.texts)


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """Facts of one request that only its spans need. ``admission`` is ``admitted``, ``shortened`` or
    ``refused``, ``None``: not reached; ``sampling`` are the settings of ``SAMPLING_NAMES``;
    ``finish_reasons`` are those of all choices, empty without an answer; ``content`` is ``None`` unless the
    route opted in.
    """

    steps: tuple[TraceStep, ...] = ()
    admission: str | None = None
    admission_reason: str | None = None
    sampling: Mapping[str, float | None] = field(default_factory=dict)
    choices: int = 1
    finish_reasons: tuple[str, ...] = ()
    content: Content | None = None


@dataclass(frozen=True, slots=True)
class EdgeRecord:
    """An HTTP answer without a generation: lists, counts, operators' calls, unknown paths. ``method`` is
    ``WS`` for a WebSocket; ``path`` is the route's path template or ``unknown``, never the path as sent;
    ``status`` is 499 when the caller disconnected.
    """

    request_id: str
    trace_id: str
    method: str
    path: str
    status: int
    total_ms: float
    tenant: str | None = None
    key_id: str | None = None
    error_code: str | None = None
    error_param: str | None = None
    error_message: str | None = None

    @property
    def failed(self) -> bool:
        return self.status >= 500


@dataclass(frozen=True, slots=True)
class TraceFigures:
    """Traces by result since the start: accepted by the collector, dropped from the full queue, refused by
    the collector, not sampled; and those in the queue now.
    """

    sent: int = 0
    dropped: int = 0
    failed: int = 0
    left_out: int = 0
    waiting: int = 0


def head_keeps(trace_id: str, ratio: float) -> bool:
    """Whether a trace is in the sampled share, by the rule of OpenTelemetry's ``TraceIdRatioBased``.

    The rule uses the id's lower 64 bits, which are random even in ids that begin with a time.
    """
    return ratio >= 1.0 or int(trace_id[16:], 16) < ratio * 18_446_744_073_709_551_616


def tail_keeps(record: RequestRecord | EdgeRecord) -> bool:
    """Whether a request's result is worth a trace: an error, a fallback, a resumed stream.

    A refused try of a batch's line is not: the line runs again.
    """
    if isinstance(record, RequestRecord) and record.runs_again:
        return False
    if record.error_code is not None or record.status >= 400:
        return True
    return isinstance(record, RequestRecord) and (
        record.fallback_kind is not None or record.seams is not None
    )
