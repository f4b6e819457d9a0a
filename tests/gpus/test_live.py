"""`sluice serve --workers 2`, used over HTTP: a worker killed under streams loses nobody anything."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from gateway.cli.serve import serve
from tests.integration.live import LiveGateway, gateway

STREAMS = 8


def ask(number: int) -> dict[str, object]:
    text = f"Tell me about a dragon and about number {number}"
    return {
        "messages": [{"role": "user", "content": text}],
        "sampling": {"max_tokens": 120, "temperature": 0.0},
        "stream": True,
    }


def streamed(
    live: LiveGateway, number: int, begun: threading.Semaphore | None = None
) -> tuple[str, dict[str, object]]:
    text, last = "", {}
    with httpx.stream(
        "POST", f"{live.url}/v1/generate", json=ask(number), headers=live.headers, timeout=120
    ) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            last = json.loads(line[6:])
            if last["type"] == "token":
                text += last["delta"]
                if begun is not None:
                    begun.release()
                    begun = None
    return text, last


def workers(live: LiveGateway) -> list[psutil.Process]:
    return [
        process
        for process in psutil.Process(live.process.pid).children()
        if any("worker-" in word for word in process.cmdline())
    ]


def test_a_worker_killed_under_streams_is_replaced_and_every_answer_is_whole(tmp_path: Path) -> None:
    with gateway(tmp_path, words=("--workers", "2")) as live:
        expected = [streamed(live, number)[0] for number in range(STREAMS)]
        first = workers(live)
        assert len(first) == 2
        begun, found = threading.Semaphore(0), {}

        def caller(number: int) -> None:
            found[number] = streamed(live, number, begun)

        threads = [threading.Thread(target=caller, args=(number,)) for number in range(STREAMS)]
        for thread in threads:
            thread.start()
        for _ in range(STREAMS // 2):
            assert begun.acquire(timeout=60)
        os.kill(first[0].pid, signal.SIGKILL)
        for thread in threads:
            thread.join(120)
        assert [found[number][0] for number in range(STREAMS)] == expected
        assert all(last["type"] == "done" and last["fallback"] is None for _, last in found.values()), found

        deadline = time.monotonic() + 60
        while len(workers(live)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        now = workers(live)
        assert len(now) == 2
        assert first[0].pid not in {process.pid for process in now}

        live.process.send_signal(signal.SIGTERM)
        assert live.process.wait(60) == 0
        assert not psutil.wait_procs(now, 30)[1], "workers end with the front"


def test_gpus_that_are_not_there_stop_the_start_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("SLUICE_SERVER__PORT", "0")
    assert serve(None, "info", gpus="all") == 1
    assert "--gpus all: there is no nvidia-smi to count them" in capsys.readouterr().err
    assert serve(None, "info", gpus="0", workers=2) == 1
    assert "--gpus and --workers: give one of them" in capsys.readouterr().err
