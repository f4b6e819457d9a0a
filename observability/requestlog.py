"""The log line of a finished request: built by the thread that writes it, not on the event loop.

There is one such line per request. It is a standard library record that carries the request's record:
structlog's processors would cost as much as the rest of telemetry.
"""

import logging
import time
from operator import attrgetter
from typing import Any

from msgspec import to_builtins
from msgspec.structs import fields

from admission.values import Reason
from observability.events import RequestRecord

EVENT = "request"

# A line omits unset fields, so that it shows what is special about the request; counts are shown also if 0.
_COUNTS = [field.name for field in fields(RequestRecord) if type(field.default) is int]
_TIMES = [name for name in RequestRecord.__struct_fields__ if name.endswith("_ms") and name != "stage_ms"]
# The fields whose values callers and operators choose, but the request's id.
outside_texts = attrgetter(
    "intent", "locale", "model", "prompt_version", "tenant", "route", "adapter_id", "error_param",
    "error_message",
)  # fmt: skip
# Refusals because of overload. An open circuit breaker means failures instead.
_OVERLOAD = frozenset([reason.value for reason in Reason]) - {Reason.CIRCUIT_OPEN.value}
_SAME = vars(logging.LogRecord("", 0, "", 0, EVENT, None, None))


class RequestLine(logging.LogRecord):
    """A log record of a finished request; :func:`request_line` gives its fields."""

    def __init__(self, logger: str, level: int, request: RequestRecord) -> None:
        # All other fields of a record are the same for every line.
        self.__dict__ = _SAME.copy()
        self.name = logger
        self.levelno = level
        self.levelname = "ERROR" if level == logging.ERROR else "INFO"
        self.created = time.time()
        self.request = request


def log_request(logger: logging.Logger, request: RequestRecord) -> None:
    """Log a finished request, as an error if the gateway is at fault; never waits."""
    level = logging.ERROR if request.failed and not _gives_way(request) else logging.INFO
    if logger.isEnabledFor(level):
        # Skips the logger's filters, since it has none.
        logger.callHandlers(RequestLine(logger.name, level, request))


def _gives_way(request: RequestRecord) -> bool:
    """Whether a batch's line runs again, or the request was refused on purpose.

    On purpose: by a gateway that drains, before the request had a revision, or by admission in the low class.
    """
    if request.runs_again or (request.error_code == "draining" and request.revision is None):
        return True
    return request.priority < 0 and request.status >= 500 and request.error_code in _OVERLOAD


def request_line(request: RequestRecord) -> dict[str, Any]:
    """The fields of the line that are set; times are rounded to a microsecond."""
    line: dict[str, Any] = to_builtins(request)
    for name in _COUNTS:
        line.setdefault(name, 0)
    if request.tenant is None:
        del line["tenant"]
    for name in _TIMES:
        value = line.get(name)
        if value.__class__ is float:
            line[name] = (value * 1000.0 + 0.5) // 1.0 / 1000.0  # ``round`` takes ten times as long
    if request.stage_ms:
        line["stage_ms"] = {
            stage: (ms * 1000.0 + 0.5) // 1.0 / 1000.0 for stage, ms in request.stage_ms.items()
        }
    return line
