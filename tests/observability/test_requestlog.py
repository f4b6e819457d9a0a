import io
import json
import logging
from collections.abc import Callable

import orjson
import pytest

from observability.events import RequestRecord, ResumeFact, ToolCallCounts
from observability.logs import configure_logging
from observability.metrics import Metrics
from observability.requestlog import log_request, request_line
from observability.subscribers import EventDispatcher

Make = Callable[..., RequestRecord]


def logged(*records: RequestRecord, level: str = "info", json_lines: bool = True) -> str:
    stream = io.StringIO()
    logs = configure_logging(level, json=json_lines, stream=stream)
    hub = EventDispatcher().record(Metrics(version="1"))
    for record in records:
        hub.emit(record)
    assert logs.close()
    return stream.getvalue()


def test_a_finished_request_is_one_line_with_time_level_and_what_is_known_of_it(record: Make) -> None:
    (line,) = [json.loads(text) for text in logged(record()).splitlines()]
    assert line.pop("timestamp").endswith("Z")
    assert (line["event"], line["level"], line["logger"]) == ("request", "info", "sluice")
    assert line["trace_id"] == record().trace_id
    assert line["stage_ms"]["admit"] == 3.2
    assert "error_code" not in line  # unknown values are left out


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({"status": 503, "error_code": "queue_full"}, "error"),
        ({"status": 200, "error_code": "backend_unavailable"}, "error"),
        ({"status": 429, "error_code": "rate_limited"}, "info"),
        ({"status": 499, "finish_reason": "cancelled"}, "info"),
        ({"status": 503, "error_code": "wait_exceeded", "priority": -1}, "info"),
        ({"status": 503, "error_code": "backend_unavailable", "priority": -1}, "error"),
        ({"status": 503, "error_code": "backend_unavailable", "batch_line": True}, "info"),
        ({"status": 500, "error_code": "internal", "batch_line": True}, "error"),
        ({"status": 200, "error_code": "wait_exceeded", "priority": -1}, "error"),
        ({"status": 503, "error_code": "draining", "revision": None}, "info"),
        ({"status": 503, "error_code": "draining"}, "error"),  # the drain has ended it in the middle
    ],
)
def test_only_our_own_faults_are_logged_as_errors(
    record: Make, changes: dict[str, object], level: str
) -> None:
    assert json.loads(logged(record(**changes)))["level"] == level


def test_credentials_in_a_callers_labels_are_redacted(record: Make) -> None:
    line = logged(record(request_id="Bearer SECRET", route="sk-SECRET", intent="https://me:SECRET@host/"))
    assert "SECRET" not in line
    assert json.loads(line)["request_id"] == "Bearer [redacted]"


def test_a_lone_surrogate_in_a_label_is_escaped_and_the_line_is_not_lost(record: Make) -> None:
    assert json.loads(logged(record(request_id="\ud800")))["request_id"] == "\ud800"


def test_times_are_rounded_to_a_microsecond(record: Make) -> None:
    line = request_line(record(total_ms=1.23456, stage_ms={"plan": 0.98765}))
    assert (line["total_ms"], line["stage_ms"]) == (1.235, {"plan": 0.988})


def test_counts_are_in_the_line_even_if_0_and_other_unset_fields_are_not() -> None:
    line = request_line(RequestRecord("req", "gen", "trace", None, "chat", 200, 1.0))
    counts = {
        "input_tokens",
        "output_tokens",
        "cached_tokens",
        "dropped_chunks",
        "dropped_turns",
        "cut_chunks",
    }
    counts |= {"merged_chunks", "summarized_turns", "priority"}
    always = {"request_id", "generation_id", "trace_id", "contract", "status", "total_ms"}
    assert line.keys() == counts | always


def test_a_terminal_gets_words_instead_of_json(record: Make) -> None:
    line = logged(record(), json_lines=False)
    assert "request" in line and "tenant=" in line and not line.startswith("{")


def test_nothing_is_made_below_the_level(record: Make) -> None:
    assert logged(record(), level="error") == ""


def test_a_request_reaches_every_handler_of_its_logger(
    record: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "sluice"):
        log_request(logging.getLogger("sluice"), record())
    assert caplog.messages == ["request"]


def test_a_line_is_json_with_the_calls_of_tools_and_where_the_answer_was_resumed(record: Make) -> None:
    """A value that orjson cannot encode would send each line to a slower encoder, which writes only types."""
    plain = orjson.loads(orjson.dumps(request_line(record())))
    assert "tool_calls" not in plain
    resume = ResumeFact(12.5, "local", "local", "exact", 3)
    line = request_line(record(tool_calls=ToolCallCounts(whole=2), seams=(resume,)))
    parsed = orjson.loads(orjson.dumps(line))
    assert parsed["tool_calls"] == {"whole": 2} and parsed["seams"][0]["mode"] == "exact"
