"""`sluice serve --workers 2`, used over HTTP: a worker killed while it streams loses no answer."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from ops.cli.serve import serve
from tests.integration.live import ROOT, LiveGateway, gateway
from tests.sse import json_events

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
        for last in json_events(answer.iter_lines()):
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


def send(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal to a worker and its engine."""
    for one in (process, *process.children(recursive=True)):
        os.kill(one.pid, number)


def in_service(live: LiveGateway) -> int:
    """Return the number of workers that the front sends requests to."""
    return round(live.metric("sluice_worker_in_service"))


def wait_for(count: int, counted: Callable[[], int]) -> None:
    deadline = time.monotonic() + 180
    while counted() != count and time.monotonic() < deadline:
        time.sleep(0.05)
    assert counted() == count


def test_a_worker_killed_under_streams_is_replaced_and_every_answer_is_whole(tmp_path: Path) -> None:
    with gateway(tmp_path, words=("--workers", "2")) as live:
        expected = [streamed(live, number)[0] for number in range(STREAMS)]
        found: dict[int, tuple[str, dict[str, object]]] = {}

        def killed_under_streams(victim: psutil.Process, then: Callable[[], None]) -> None:
            begun = threading.Semaphore(0)

            def caller(number: int) -> None:
                found[number] = streamed(live, number, begun)

            threads = [threading.Thread(target=caller, args=(number,)) for number in range(STREAMS)]
            for thread in threads:
                thread.start()
            for _ in range(STREAMS // 2):
                assert begun.acquire(timeout=60)
            os.kill(victim.pid, signal.SIGKILL)
            then()
            for thread in threads:
                thread.join(120)
            assert [found[number][0] for number in range(STREAMS)] == expected, found
            assert all(last["type"] == "done" for _, last in found.values()), found

        first = workers(live)
        assert len(first) == 2
        killed_under_streams(first[0], lambda: None)
        wait_for(2, lambda: len(workers(live)))
        now = workers(live)
        assert first[0].pid not in {process.pid for process in now}

        # The only worker in service dies: its requests wait for the next worker in service.
        wait_for(2, lambda: in_service(live))
        halted, last_one = now
        send(halted, signal.SIGSTOP)
        wait_for(1, lambda: in_service(live))
        killed_under_streams(last_one, lambda: send(halted, signal.SIGCONT))

        live.process.send_signal(signal.SIGTERM)
        assert live.process.wait(60) == 0
        assert not psutil.wait_procs(now, 30)[1], "workers end with the front"


def test_adapters_added_at_run_time_and_priorities_reach_the_workers(tmp_path: Path) -> None:
    with gateway(tmp_path, words=("--workers", "2"), SLUICE_ENGINE__MAX_LORAS="2") as live:
        adapter = ROOT / "models" / "adapters" / "jp_style_v1"
        added = httpx.post(
            f"{live.url}/admin/adapters",
            json={"id": "fresh", "location": str(adapter)},
            headers=live.headers,
            timeout=60,
        )
        assert added.status_code == 201, added.text
        deadline = time.monotonic() + 60
        while True:
            body = {**ask(1), "adapter_id": "fresh", "priority": 1, "stream": False}
            answer = httpx.post(f"{live.url}/v1/generate", json=body, headers=live.headers, timeout=120)
            # Until the workers have the adapter, the answer is degraded.
            has_it = answer.status_code == 200 and answer.json()["fallback"] is None
            if has_it or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert body["fallback"] is None and body["backend_version"].endswith("+fresh"), body
        base = httpx.post(
            f"{live.url}/v1/generate", json={**ask(1), "stream": False}, headers=live.headers, timeout=120
        )
        assert body["output_text"] != base.json()["output_text"]


def test_gpus_that_are_not_there_stop_the_start_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("SLUICE_SERVER__PORT", "0")
    assert serve(None, "info", gpus="all") == 1
    assert "--gpus all: nvidia-smi lists no GPU here" in capsys.readouterr().err
    assert serve(None, "info", gpus="0", workers=2) == 1
    assert "--gpus and --workers: give one of them" in capsys.readouterr().err
