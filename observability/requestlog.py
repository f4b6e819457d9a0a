"""The log line of a finished request: put together by the thread that writes it, not on the event loop.

There is one such line a request, far more than of all others together. It takes the standard library's way
to the handlers, as a record that carries the request's own; structlog's processors would cost as much as all
the rest of telemetry, and even the library's record looks up more than anybody reads.
"""

from __future__ import annotations

import logging
import time
from operator import attrgetter
from types import MappingProxyType

from observability.events import RequestRecord

EVENT = "request"

# A line leaves out what is at rest, so that it shows what was special about its request.
_FIELDS = tuple(name for name in RequestRecord.__struct_fields__ if name != "stage_ms")
_values = attrgetter(*_FIELDS)
_TIMES = tuple(name for name in _FIELDS if name.endswith("_ms"))
_SAME = MappingProxyType(vars(logging.LogRecord("", 0, "", 0, EVENT, None, None)))


class RequestLine(logging.LogRecord):
    """A log record whose words are a finished request; :func:`request_line` has its fields."""

    def __init__(self, logger: str, level: int, request: RequestRecord) -> None:
        # What a record has besides is the same for all of them.
        self.__dict__.update(_SAME)
        self.name = logger
        self.levelno = level
        self.levelname = "ERROR" if level == logging.ERROR else "INFO"
        self.created = time.time()
        self.request = request


class RequestLog:
    """Logs finished requests; the house's own faults as errors."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def __call__(self, request: RequestRecord) -> None:
        """Hand one on; never waits."""
        level = logging.ERROR if request.failed else logging.INFO
        if self._logger.isEnabledFor(level):
            self._logger.handle(RequestLine(self._logger.name, level, request))


def request_line(request: RequestRecord) -> dict[str, object]:
    """The fields that say something; times are rounded to a microsecond."""
    line: dict[str, object] = {
        name: value
        for name, value in zip(_FIELDS, _values(request), strict=True)
        if value is not None and value is not False
    }
    for name in _TIMES:
        value = line.get(name)
        if value.__class__ is float:
            line[name] = _rounded(value)
    if request.stage_ms:
        line["stage_ms"] = {stage: _rounded(took) for stage, took in request.stage_ms.items()}
    return line


def others_words(request: RequestRecord) -> str:
    """What of the line callers and operators chose, together."""
    return (
        f"{request.request_id} {request.intent} {request.locale} {request.model} {request.prompt_version}"
        f" {request.tenant} {request.route} {request.adapter_id}"
    )


def _rounded(value_ms: float) -> float:
    """To a microsecond; ``round`` takes five times as long."""
    return int(value_ms * 1000 + 0.5) / 1000
