"""vLLM's processes log to the gateway and end with it; tested with processes that are not vLLM."""

from __future__ import annotations

import asyncio
import json
import logging
import logging.config
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import structlog
from structlog.testing import LogCapture

from gateway.backends.vllm.child_logs import ChildLogs

ROOT = Path(__file__).parents[2]


@pytest.fixture
def captured() -> Iterator[LogCapture]:
    capture = LogCapture()
    before = structlog.get_config()
    structlog.configure(processors=[capture], wrapper_class=structlog.make_filtering_bound_logger(0))
    yield capture
    structlog.configure(**before)


def child(config: str) -> None:
    logging.config.dictConfig(json.loads(Path(config).read_text()))
    log = logging.getLogger("vllm.somewhere")
    log.info("too quiet")
    log.warning("a warning with %s", "words")
    print("printed")
    try:
        raise ValueError("the cause\nin two lines")
    except ValueError:
        log.exception("EngineCore failed to start.")
    sys.stderr.write("Traceback of a process\n")


class Freed:
    """Says on standard error that it was freed; so does a library that reports leaks."""

    def __init__(self, text: bytes) -> None:
        self.text = text

    def __del__(self, write: Callable[[int, bytes], int] = os.write) -> None:
        write(2, self.text)


def child_with_objects(config: str) -> None:
    logging.config.dictConfig(json.loads(Path(config).read_text()))
    held: list[object] = [Freed(b"collected"), Freed(b"reported")]
    held[0].__dict__["itself"] = held[0]
    sys.__dict__["held"] = held


async def until(met: Callable[[], object], timeout_s: float = 30.0) -> None:
    for _ in range(round(timeout_s / 0.02)):
        if met():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not come to pass")


async def run_child(
    logs: ChildLogs, capfd: pytest.CaptureFixture[str], target: Callable[[str], None] = child
) -> tuple[str, str]:
    logs.listen()
    path = logs.write_config("WARNING")
    process = multiprocessing.get_context("spawn").Process(
        target=target, args=(str(path),), name="EngineCore"
    )
    process.start()
    await asyncio.to_thread(process.join, 60)
    assert process.exitcode == 0
    logs.drain()
    out, err = capfd.readouterr()
    return out, err


async def test_what_a_process_logs_and_prints_reaches_the_gateways_logs_and_not_its_output(
    captured: LogCapture, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = ChildLogs()
    try:
        logs.started()
        out, _ = await run_child(logs, capfd)
    finally:
        logs.close()
    by_event = {entry["event"]: entry for entry in captured.entries}
    assert "too quiet" not in by_event
    assert by_event["a warning with words"]["log_level"] == "warning"
    assert by_event["a warning with words"]["process"] == "EngineCore"
    assert by_event["printed"]["log_level"] == "debug"
    failed = by_event["EngineCore failed to start."]
    assert failed["log_level"] == "error"
    assert failed["error"] == "ValueError: the cause\nin two lines"
    assert "raise ValueError" in failed["trace"]
    assert out == ""


async def test_an_error_during_the_start_is_stored_for_the_start_error_and_not_logged(
    captured: LogCapture, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = ChildLogs()
    try:
        await run_child(logs, capfd)
        [error] = logs.errors
    finally:
        logs.close()
    assert error.error.startswith("ValueError: the cause")
    assert not [entry for entry in captured.entries if entry["log_level"] == "error"]


async def test_a_process_that_ends_frees_nothing_and_no_library_reports_that_as_a_leak(
    capfd: pytest.CaptureFixture[str],
) -> None:
    logs = ChildLogs()
    try:
        assert await run_child(logs, capfd, child_with_objects) == ("", "")
    finally:
        logs.close()


async def test_closing_the_logs_removes_their_folder() -> None:
    logs = ChildLogs()
    logs.listen()
    logs.write_config("WARNING")
    assert logs.folder.is_dir()
    logs.close()
    assert not logs.folder.exists()
    assert logs.errors == ()


OWNER = """
import json, logging.config, multiprocessing, sys, time

def core(config):
    logging.config.dictConfig(json.load(open(config)))
    print(1)
    time.sleep(600)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=core, args=(sys.argv[1],), name="EngineCore")
    process.start()
    print(process.pid, flush=True)
    time.sleep(600)
"""


def start(script: Path, config: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(script), str(config)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


async def test_a_process_of_vllm_ends_when_the_gateway_is_killed(
    tmp_path: Path, captured: LogCapture
) -> None:
    logs = ChildLogs()
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    owner = start(script, logs.write_config("WARNING"))
    try:
        assert owner.stdout is not None
        core = psutil.Process(int(owner.stdout.readline()))
        logs.listen()
        await until(lambda: captured.entries, 60.0)  # a log line shows that its logging is set up
        os.kill(owner.pid, signal.SIGKILL)
        await until(lambda: not core.is_running() or core.status() == psutil.STATUS_ZOMBIE)
    finally:
        owner.kill()
        owner.wait()
        logs.close()
