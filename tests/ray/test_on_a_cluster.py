"""The application on a real Ray cluster: replicas die, come and go under load, and no request fails.

The engines compute nothing and answer slowly, so that several of them fit on a small machine: at a GPU's pace, the
callers' tokens would take the cores that new replicas need to start.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner
from websockets.sync.client import connect

from benchmarks.ray_cluster import Application, Callers, cluster, deploy, until, write_config
from observability.metrics_text import total_of
from ops.cli.main import app as sluice
from tests.state.servers import free_port

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.serial,
    # Warnings from Ray's own modules.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
SCALE_TIMEOUT_S = 300.0
ENGINES = 3
STEP_S = 0.08
BODY = {
    "messages": [{"role": "user", "content": "What should I read next?"}],
    "sampling": {"temperature": 0, "max_tokens": 4},
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    """An application of one ingress replica and one to three engine replicas."""
    folder = tmp_path_factory.mktemp("ray")
    config = write_config(
        folder,
        engine={"max_num_seqs": 8},
        admission={"max_wait_ms": 60_000.0},
        ray={
            "engines_max": ENGINES,
            "engine_target_sequences": 4.0,
            "scale_up_seconds": 0.5,
            "scale_down_seconds": 1.0,
            "metrics_seconds": 0.5,
        },
    )
    with cluster(free_port()) as url:
        yield deploy(url, config, paced=True, step_s=STEP_S)


def metric(url: str, name: str) -> float:
    """Return the sum of a metric over its labels."""
    return total_of(httpx.get(f"{url}/metrics", timeout=60).text, name)


def test_the_gateways_contracts_are_served(running: Application) -> None:
    whole = httpx.post(f"{running.url}/v1/generate", json=BODY, timeout=60).json()
    assert whole["backend"] == "embedded"
    assert whole["usage"]["output_tokens"] == 4
    assert whole["fallback"] is None
    chat = httpx.post(
        f"{running.url}/v1/chat/completions",
        json={"model": "demo", "messages": BODY["messages"], "max_tokens": 4, "temperature": 0},
        timeout=60,
    ).json()
    assert chat["choices"][0]["finish_reason"] == "length"
    with connect(running.url.replace("http:", "ws:") + "/v1/generate/ws") as socket:
        socket.send(json.dumps(BODY))
        events = [json.loads(message) for message in socket]
    assert "".join(event["delta"] for event in events[:-1]) == whole["output_text"]
    refused = httpx.post(f"{running.url}/v1/generate", json={"messages": []}, timeout=60)
    assert refused.status_code == 422


async def test_load_adds_replicas_and_killing_one_loses_no_request(running: Application) -> None:
    callers = Callers(running.url, count=20, tokens=24)
    async with callers.calling() as tally:

        async def more_answers() -> None:
            whole = tally.whole
            await until(lambda: tally.whole >= whole + 20, SCALE_TIMEOUT_S)

        for _ in range(5):
            await running.wait_for("Engine", ENGINES, SCALE_TIMEOUT_S)
            await more_answers()
            running.signal_replicas("Engine")
            await more_answers()
            if metric(running.url, "sluice_resumed_streams_total") > 0:
                break  # otherwise the killed replica was streaming no answer
        await running.wait_for("Engine", ENGINES, SCALE_TIMEOUT_S)
    assert not tally.faults
    assert metric(running.url, "sluice_resumed_streams_total") > 0


async def test_replicas_that_are_scaled_down_while_they_stream_break_no_answer(running: Application) -> None:
    callers = Callers(running.url, count=8, tokens=40)
    async with callers.calling() as tally:
        before = metric(running.url, "sluice_resumed_streams_total")
        await until(
            lambda: running.states("Engine").get("RUNNING", 0) <= 2 and tally.whole >= 8, SCALE_TIMEOUT_S
        )
    assert not tally.faults
    await running.wait_for("Engine", 1, SCALE_TIMEOUT_S)
    assert metric(running.url, "sluice_resumed_streams_total") == before


async def test_a_caller_who_leaves_frees_the_engine(running: Application) -> None:
    long = {**BODY, "stream": True, "sampling": {"temperature": 0, "max_tokens": 2000}}
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", f"{running.url}/v1/generate", json=long) as answer,
    ):
        await anext(answer.aiter_lines())
    await until(lambda: metric(running.url, "sluice_requests_in_flight") == 0, 120)


def test_status_tells_the_replicas(running: Application) -> None:
    invoked = CliRunner().invoke(sluice, ["ray", "status", "--json"])
    assert invoked.exit_code == 0, invoked.output
    status = json.loads(invoked.stdout)
    assert status["status"] == "RUNNING"
    assert status["deployments"]["Engine"]["replicas"] == {"RUNNING": 1}
    assert list(status["proxies"].values()) == ["HEALTHY"]
    unknown = CliRunner().invoke(sluice, ["ray", "status", "--application", "other"])
    assert unknown.exit_code == 1


async def test_another_configuration_takes_over_under_load(running: Application, tmp_path: Path) -> None:
    """A rolling update replaces the paced engine with the embedded one."""
    config = write_config(tmp_path, engine={"max_num_seqs": 8}, ray={"surge_percent": 100})
    callers = Callers(running.url, count=2, tokens=20, prompts=2)
    async with callers.calling() as tally:
        done = await asyncio.to_thread(
            CliRunner().invoke,
            sluice,
            ["ray", "deploy", str(config), "--port", running.url.rpartition(":")[2]],
        )
        assert done.exit_code == 0, done.output
    # The new engine gives other answers; each must be whole.
    assert not [fault for fault in tally.faults if fault != "another answer than before"]
    answer = await asyncio.to_thread(httpx.post, f"{running.url}/v1/generate", json=BODY, timeout=60)
    assert answer.json()["finish_reason"] == "length"
    assert answer.json()["fallback"] is None
