import asyncio
import errno
import gc
import io
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog

from observability.logs import Logs, configure_logging
from observability.logwriter import BatchedLines, LogWriter

Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def logged() -> Iterator[Lines]:
    stream = io.StringIO()
    logs = configure_logging("info", json=True, stream=stream)
    closed = False

    def lines() -> list[dict[str, Any]]:
        nonlocal closed
        closed = logs.close()
        assert closed
        return [json.loads(line) for line in stream.getvalue().splitlines()]

    yield lines
    if not closed:
        logs.close()


def test_a_line_is_one_json_object_with_time_level_and_words(logged: Lines) -> None:
    structlog.get_logger("sluice").info("request", status=200, tenant="shop")
    (line,) = logged()
    assert line.pop("timestamp").endswith("Z")
    assert line == {"event": "request", "level": "info", "logger": "sluice", "status": 200, "tenant": "shop"}


def test_secrets_and_text_are_redacted(logged: Lines) -> None:
    structlog.get_logger("sluice").warning(
        "odd", api_key="SECRET", authorization="Bearer SECRET", prompt="SECRET", nested={"content": "SECRET"}
    )
    (line,) = logged()
    assert "SECRET" not in json.dumps(line)
    assert line["api_key"] == "[redacted]"


def test_the_standard_librarys_logs_come_out_the_same_way(logged: Lines) -> None:
    logging.getLogger("some.library").warning("listening with %s", "Bearer SECRET")
    (line,) = logged()
    assert (line["event"], line["level"], line["logger"]) == (
        "listening with Bearer [redacted]", "warning", "some.library",
    )  # fmt: skip


def test_lines_below_the_level_are_left_out(logged: Lines) -> None:
    structlog.get_logger("sluice").debug("quiet")
    logging.getLogger("x").debug("quiet")
    assert logged() == []


def test_an_exception_keeps_its_places_and_causes_and_loses_its_words(logged: Lines) -> None:
    try:
        try:
            int("SECRET words of a caller")
        except ValueError as error:
            raise ExceptionGroup(
                "SECRET", [LookupError("SECRET"), ConnectionRefusedError(111, "refused")]
            ) from error
    except ExceptionGroup:
        structlog.get_logger("sluice").exception("failed")
        logging.getLogger("some.library").exception("failed too")
    for line in logged():
        assert "SECRET" not in json.dumps(line)
        cause, _, error = line["exception"].partition("ValueError\n")
        assert "test_logs.py" in cause and "ExceptionGroup" in error
        assert "LookupError" in error and "ConnectionRefusedError: refused" in error


def test_a_failed_task_is_logged_without_its_error_message(logged: Lines) -> None:
    async def fail() -> None:
        raise ValueError("SECRET words of a caller")

    async def forget() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        task = asyncio.Task(fail())
        await asyncio.wait([task])
        del task
        gc.collect()

    asyncio.run(forget())
    lines = logged()
    assert any("never retrieved" in line["event"] for line in lines)
    assert "SECRET" not in json.dumps(lines)


def test_a_lone_surrogate_is_escaped_and_the_line_is_not_lost(logged: Lines) -> None:
    structlog.get_logger("sluice").info("request", request_id="\ud800")
    (line,) = logged()
    assert line["request_id"] == "\ud800"


def test_closing_leaves_logging_as_it_was() -> None:
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    logs: Logs = configure_logging("error", json=True, stream=io.StringIO())
    logs.close()
    assert (list(root.handlers), root.level) == before


class Stuck(logging.Handler):
    """A handler that blocks like a pipe without a reader, until ``unblock`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.unblock = threading.Event()
        self.written: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.unblock.wait(10)
        self.written.append(record.getMessage())


def test_a_stuck_pipe_blocks_no_caller_and_lost_lines_are_counted_and_logged() -> None:
    pipe = Stuck()
    writer = LogWriter(pipe, capacity=10)
    for number in range(50):
        writer.handle(logging.LogRecord("x", logging.INFO, "", 0, f"line {number}", (), None))
    assert 39 <= writer.dropped <= 40  # ten in the queue, perhaps one being written
    assert not writer.stop(timeout_s=0.05)
    pipe.unblock.set()
    assert writer.stop(timeout_s=5)
    assert pipe.written[0] == "line 0"
    assert f"{writer.dropped} log lines were dropped" in pipe.written


class Counting(io.StringIO):
    """A stream that counts its writes."""

    writes = 0

    def write(self, text: str) -> int:
        self.writes += 1
        return super().write(text)


def test_lines_that_come_together_are_written_together_and_in_order() -> None:
    stream = Counting()
    logs = configure_logging("info", json=True, stream=stream)
    for number in range(200):
        structlog.get_logger("sluice").info("line", number=number)
    assert logs.close()
    assert [json.loads(line)["number"] for line in stream.getvalue().splitlines()] == list(range(200))
    assert stream.writes < 20


class FullDisk(io.StringIO):
    """A stream that refuses every write while it is ``full``."""

    full = True
    refused = 0

    def write(self, text: str) -> int:
        if self.full:
            self.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_lines_are_written_again_once_a_full_disk_has_room_and_the_lost_ones_are_counted() -> None:
    stream = FullDisk()
    logs = configure_logging("info", json=True, stream=stream)
    for number, text in enumerate(("lost", "lost too"), 1):
        structlog.get_logger("sluice").info(text)
        deadline = time.monotonic() + 60
        while stream.refused < number:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    stream.full = False
    structlog.get_logger("sluice").info("written")
    assert logs.close()
    assert logs.dropped == 2
    events = [json.loads(line)["event"] for line in stream.getvalue().splitlines()]
    assert events == ["written", "2 log lines were dropped"]


class Picky(logging.Formatter):
    """A formatter that fails on the line ``bad``."""

    def format(self, record: logging.LogRecord) -> str:
        if record.msg == "bad":
            raise ValueError("no words for it")
        return str(record.msg)


def test_a_line_that_cannot_be_written_as_text_does_not_stop_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stream = io.StringIO()
    lines = BatchedLines(stream)
    lines.setFormatter(Picky())
    for words in ("one", "bad", "two"):
        lines.handle(logging.LogRecord("x", logging.INFO, "", 0, words, (), None))
    lines.flush()
    assert stream.getvalue() == "one\ntwo\n"
    assert "no words for it" in capsys.readouterr().err


@pytest.mark.parametrize("as_json", [True, False])
def test_control_characters_are_escaped_in_every_line(as_json: bool) -> None:
    stream = io.StringIO()
    logs = configure_logging("info", json=as_json, stream=stream)
    hostile = "a\x1b[2Jb\x9bc\x7fd\u202ee\nforged"
    structlog.get_logger("x").info("words", name=hostile, nested=[hostile])
    logging.getLogger("y").warning("label %s", hostile)
    try:
        raise ValueError("words")
    except ValueError:
        structlog.get_logger("z").exception("failed")
    assert logs.close()
    written = stream.getvalue()
    assert not set(written) & set("\x1b\x9b\x7f\u202e") and "\nforged" not in written
    if as_json:
        lines = [json.loads(line) for line in written.splitlines()]
        assert lines[0]["name"] == lines[0]["nested"][0] == hostile
    else:
        assert written.count(r"a\u001b[2Jb\u009bc\u007fd\u202ee\u000aforged") == 2
        # A traceback keeps its line breaks.
        assert "ValueError" in written.splitlines()[-1] and len(written.splitlines()) > 3
