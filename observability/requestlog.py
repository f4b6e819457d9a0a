"""The log line of a finished request: put together by the thread that writes it, not on the event loop.

There is one such line a request, far more than of all others together. It takes the standard library's way
to the handlers, as a record that carries the request's own; structlog's processors would cost as much as all
the rest of telemetry.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from operator import attrgetter

from observability.events import RequestRecord

EVENT = "request"

# A line leaves out what is at rest, so that it shows what was special about its request.
_FIELDS = tuple(field.name for field in fields(RequestRecord) if field.name != "stage_ms")
_values = attrgetter(*_FIELDS)


class RequestLine(logging.LogRecord):
    """A log record whose words are a finished request; :func:`request_line` has its fields."""

    def __init__(self, logger: str, level: int, request: RequestRecord) -> None:
        super().__init__(logger, level, "", 0, EVENT, None, None)
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
        name: round(value, 3) if type(value) is float else value
        for name, value in zip(_FIELDS, _values(request), strict=True)
        if value is not None and value is not False
    }
    if request.stage_ms:
        line["stage_ms"] = {stage: round(took, 3) for stage, took in request.stage_ms.items()}
    return line
