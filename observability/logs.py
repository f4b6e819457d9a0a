"""Structured logs: one JSON object per line (or coloured text on a terminal), secrets and text redacted."""

import json as stdlib_json
import logging
import re
import sys
from collections.abc import Mapping, MutableMapping
from datetime import UTC, datetime
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, TextIO

import orjson
import structlog
from structlog.typing import Processor

from observability.log_errors import format_errors
from observability.logwriter import BatchedLines, LogWriter
from observability.printable import printable
from observability.redact import redact, scrub
from observability.requestlog import EVENT, RequestLine, outside_texts, request_line

LEVELS = ("debug", "info", "warning", "error", "critical")
# Fields that the processors add; never redacted.
_OWN = frozenset({"timestamp", "level", "logger", "_record", "_from_structlog", "exc_info", "stack_info"})
_NOTHING: Mapping[str, str] = MappingProxyType({})
# Libraries whose info lines are useless to an operator: a line for each plug-in.
_QUIET = ("alembic.runtime.plugins",)


class Logs:
    """The configured logging of the process; the caller closes it at the end."""

    def __init__(self, writer: LogWriter, root_level: int) -> None:
        self.writer = writer
        self._root_level = root_level

    @property
    def dropped(self) -> int:
        """Lines lost because they came faster than they could be written."""
        return self.writer.dropped

    def close(self) -> bool:
        """Write queued lines (for a bounded time) and restore logging; returns whether all were written."""
        root = logging.getLogger()
        root.removeHandler(self.writer)
        root.setLevel(self._root_level)
        for name in _QUIET:
            logging.getLogger(name).setLevel(logging.NOTSET)
        structlog.reset_defaults()
        return self.writer.stop()


def configure_logging(
    level: str = "info",
    json: bool | None = None,
    *,
    stream: TextIO | None = None,
    always: Mapping[str, str] = _NOTHING,
) -> Logs:
    """Send the process's logs, structlog's and the standard library's, to ``stream`` (standard error).

    ``level`` is one of :data:`LEVELS` in any case; ``json`` is by default true unless ``stream`` is a
    terminal; the fields ``always`` are in every line.
    """
    threshold = logging.getLevelNamesMapping()[level.upper()]
    target_stream = stream if stream is not None else sys.stderr
    as_json = not target_stream.isatty() if json is None else json

    common: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        format_errors,
        lambda logger, method, event: {**event, **always},
        _redacted,
    ]
    structlog.configure(
        processors=[*common, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    renderer: Processor = (
        structlog.processors.JSONRenderer(serializer=_dumps)
        if as_json
        else partial(_as_words, structlog.dev.ConsoleRenderer(colors=target_stream.isatty()))
    )
    target = BatchedLines(target_stream)
    target.setFormatter(_Formatter(common, renderer, as_json=as_json, always=always))
    root = logging.getLogger()
    logs = Logs(LogWriter(target), root.level)
    root.addHandler(logs.writer)
    root.setLevel(threshold)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(threshold, logging.WARNING))
    return logs


class _Formatter(structlog.stdlib.ProcessorFormatter):
    """structlog's formatter, with a fast path for the lines of requests."""

    def __init__(
        self, common: list[Processor], render: Processor, *, as_json: bool, always: Mapping[str, str]
    ) -> None:
        super().__init__(processors=[self.remove_processors_meta, render], foreign_pre_chain=common)
        self._render = render
        self._always = always
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        if not isinstance(record, RequestLine):
            return super().format(record)
        event = request_line(record.request)
        event["event"] = EVENT
        event["level"] = record.levelname.lower()
        event["logger"] = record.name
        seconds, fraction = divmod(record.created, 1)
        event["timestamp"] = f"{_utc(seconds)}.{int(fraction * 1_000_000):06}Z"
        event.update(self._always)
        line = _dumps(event) if self._as_json else str(self._render(None, "", event))
        # The field names are ours, so only credentials in external text are searched, in all of it at once.
        clean = _is_clean(*outside_texts(record.request)) and (
            _own_id(record.request.request_id) or _is_clean(record.request.request_id)
        )
        return line if clean else str(self._render(None, "", _redacted(None, "", event)))


@lru_cache(maxsize=256)  # most texts are the same in many lines
def _is_clean(*texts: str | None) -> bool:
    words = " ".join(map(str, texts))
    return scrub(words) is words


# An id that the gateway made; no credential looks like one.
_own_id = re.compile("req_[0-9a-f]+").fullmatch


@lru_cache(maxsize=2)
def _utc(seconds: float) -> str:
    """The time in UTC, as ISO 8601 without a zone; cached, since many lines have one second."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().removesuffix("+00:00")


def _redacted(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for name, value in event.items():
        if name not in _OWN:
            # ``event`` is our own text, so only credentials inside it are redacted.
            event[name] = redact("", value) if name in ("event", "exception") else redact(name, value)
    return event


def _as_words(
    renderer: Processor, logger: Any, method: str, event: MutableMapping[str, Any]
) -> Any:  # a renderer's text, as structlog declares it
    shown = {
        name: printable(value, lines=name == "exception") if isinstance(value, str) else value
        for name, value in event.items()
    }
    return renderer(logger, method, shown)


def _dumps(value: object, **_: object) -> str:
    try:
        line = orjson.dumps(value).decode()
        # JSON already escapes the characters below a space.
        return line if line.isascii() and "\x7f" not in line else printable(line)
    except TypeError:
        # A lone surrogate in a caller's label: escaped rather than lost.
        return stdlib_json.dumps(value, default=lambda other: f"<{type(other).__name__}>")
