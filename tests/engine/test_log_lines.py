"""The log of the engine process: one JSON object per line, or plain text on a terminal."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from engine.process import log_to


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger; its handlers and its level are restored after the test."""
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_a_line_is_json_and_an_exception_is_logged_without_its_message(root: logging.Logger) -> None:
    stream = io.StringIO()
    log_to(stream)
    root.debug("not told")
    root.info('took "%s"\nblocks', 7)
    try:
        raise ValueError("a prompt of a caller")
    except ValueError:
        root.exception("the engine failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["event"] == 'took "7"\nblocks' and first["timestamp"].endswith("Z")
    assert (first["level"], first["process"]) == ("info", "engine")
    assert second["level"] == "error"
    assert second["exception"].startswith("ValueError at test_a_line_is_json")
    assert "a prompt" not in stream.getvalue()


def test_a_terminal_gets_plain_text(root: logging.Logger) -> None:
    stream = Terminal()
    log_to(stream)
    root.info("ready")
    assert stream.getvalue().endswith("engine INFO ready\n")
