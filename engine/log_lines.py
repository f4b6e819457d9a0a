"""The engine process's log: one JSON object a line, as the gateway's, or words on a terminal.

The gateway's own formatter is out of reach here: the engine's process loads nothing of the gateway.
"""

from __future__ import annotations

import json
import logging
import traceback
from datetime import UTC, datetime
from typing import TextIO


class JsonLines(logging.Formatter):
    """With the names of the gateway's lines; of exceptions type and place: their words may quote callers."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line = {
            "event": record.getMessage(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": "engine",
            "timestamp": datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        }
        if record.exc_info is not None and record.exc_info[1] is not None:
            line["exception"] = _told(record.exc_info[1])
        return json.dumps(line)


def log_to(stream: TextIO) -> None:
    """Send this process's log to ``stream``, from ``info`` on."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        logging.Formatter("%(asctime)s engine %(levelname)s %(message)s") if stream.isatty() else JsonLines()
    )
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)


def _told(error: BaseException) -> str:
    frames = reversed(traceback.extract_tb(error.__traceback__))
    places = " < ".join(f"{frame.name} ({frame.filename}:{frame.lineno})" for frame in frames)
    return f"{type(error).__name__} at {places}"
