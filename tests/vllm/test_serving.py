"""`sluice serve` with vLLM in its process tree, used over HTTP."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.fork_server import ImportingPopen
from tests.integration.live import ADMIN_KEY, LiveGateway, gateway
from tests.vllm.conftest import needs_vllm

# A group without a vLLM host in the test process: a host that stops ends every vLLM process below it.
pytestmark = [pytest.mark.xdist_group("conformance-vllm-worker"), *needs_vllm[1:]]

START_TIMEOUT_S = 600.0
ENV = {
    "SLUICE_ENGINE__KIND": "vllm",
    "SLUICE_ENGINE__BLOCK_SIZE": "32",
    "SLUICE_ENGINE__MAX_MODEL_LEN": "1024",
    "SLUICE_ENGINE__MAX_NUM_SEQS": "16",
    "SLUICE_ENGINE__ENFORCE_EAGER": "true",
    "SLUICE_ADMISSION__MAX_WAIT_MS": "60000",
}
# A second vLLM in the same process tree.
VECTORS = {
    f"SLUICE_ENGINES__VECTORS__{key}": value
    for key, value in {
        "KIND": "vllm",
        "TASK": "embed",
        "MODEL": "models/demo",
        "SERVED_MODEL_NAME": "demo-vectors",
        "ENFORCE_EAGER": "true",
        "KV_CACHE_BYTES": str(64 << 20),
        "NUM_THREADS": "1",
    }.items()
}
ASK = {
    "messages": [{"role": "user", "content": "LogSender me about a dragon"}],
    "sampling": {"max_tokens": 8},
}
LONG = {**ASK, "sampling": {"max_tokens": 600, "temperature": 0.0}}


@contextlib.contextmanager
def serving(folder: Path, **env: str) -> Iterator[LiveGateway]:
    with gateway(folder, ready=False, **{**ENV, **env}) as live:
        yield live


def wait_ready(live: LiveGateway) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert live.process.poll() is None, live.log.read_text()[-3000:]
        if httpx.get(f"{live.url}/ready", timeout=60).status_code == 200:
            return
        time.sleep(0.1)
    raise AssertionError(live.log.read_text()[-3000:])


def below(live: LiveGateway) -> list[psutil.Process]:
    return psutil.Process(live.process.pid).children(recursive=True)


def all_gone(processes: list[psutil.Process], timeout_s: float = 60.0) -> bool:
    return not psutil.wait_procs(processes, timeout_s)[1]


@pytest.fixture(scope="module", autouse=True)
def importing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveGateway]:
    """A gateway that imports vLLM itself, as an operator's does; for the others vLLM is imported in advance.

    Its start takes a minute; the other tests run meanwhile.
    """
    folder = tmp_path_factory.mktemp("vllm-importing")
    with gateway(folder, ready=False, start=ImportingPopen, **ENV) as running:
        yield running


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveGateway]:
    with serving(tmp_path_factory.mktemp("vllm-live"), **VECTORS) as running:
        loading = httpx.get(f"{running.url}/ready", timeout=60)
        assert loading.status_code == 503
        assert httpx.get(f"{running.url}/ping", timeout=60).json()["status"] == "healthy"
        wait_ready(running)
        yield running


def test_a_native_answer_says_that_vllm_gave_it(live: LiveGateway) -> None:
    answer = httpx.post(f"{live.url}/v1/generate", json=ASK, headers=live.headers, timeout=60)
    body = answer.json()
    assert answer.status_code == 200, body
    assert body["backend"] == "vllm"
    assert body["fallback"] is None
    assert 0 < body["usage"]["output_tokens"] <= 8
    assert body["timings"]["queue_wait_ms"] >= 0
    again = httpx.post(f"{live.url}/v1/generate", json=ASK, headers=live.headers, timeout=60).json()
    assert again["usage"]["cached_tokens"] > 0


def test_the_official_client_streams(live: LiveGateway) -> None:
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key=ADMIN_KEY)
    stream = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "LogSender me about a dragon"}],
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens <= 12
    whole = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "LogSender me about a dragon"}],
        max_tokens=12,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    assert whole.choices[0].message.content == text
    assert whole.choices[0].logprobs is not None


def test_vectors_come_from_the_second_engine_whose_death_the_first_one_survives(live: LiveGateway) -> None:
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key=ADMIN_KEY, max_retries=0)

    def vectors(*inputs: str) -> list[list[float]]:
        made = client.embeddings.create(model="demo-vectors", input=list(inputs))
        return [one.embedding for one in made.data]

    sea, again, mountain = vectors("a book about the sea", "a book about the sea", "mountains")
    assert sum(one * one for one in sea) == pytest.approx(1, abs=1e-5)
    assert sea == pytest.approx(again, abs=1e-5) and sea != pytest.approx(mountain, abs=0.05)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="demo-vectors", messages=[{"role": "user", "content": "Hi"}])
    with pytest.raises(openai.BadRequestError, match="Matryoshka"):
        client.embeddings.create(model="demo-vectors", input="a text", dimensions=8)

    cores = [one for one in below(live) if one.name().startswith("VLLM::EngineCor")]
    assert len(cores) == 2, cores
    second = max(cores, key=psutil.Process.create_time)
    second.kill()
    deadline = time.monotonic() + START_TIMEOUT_S
    while live.metric("sluice_engine_restarts_total") < 1:
        assert time.monotonic() < deadline, live.log.read_text()[-3000:]
        time.sleep(0.1)
    whole = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "Hi"}], max_tokens=4
    )
    assert whole.choices[0].message.content, "the first engine answers while the second one loads"
    wait_ready_engine(live, "vectors")
    assert vectors("a book about the sea")[0] == pytest.approx(sea, abs=1e-5)
    assert all(one.is_running() for one in cores if one != second)


def wait_ready_engine(live: LiveGateway, name: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        engines = httpx.get(f"{live.url}/ready", timeout=60).json()["engines"]
        if engines[name]["state"] == "ready":
            return
        assert time.monotonic() < deadline, live.log.read_text()[-3000:]
        time.sleep(0.1)


def test_a_caller_that_goes_away_frees_its_sequence(live: LiveGateway) -> None:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "LogSender me everything"}],
        "max_tokens": 800,
        "n": 2,
        "temperature": 1,
        "logit_bias": {"2": -100},
        "stream": True,
    }
    url = f"{live.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=live.headers, timeout=60) as answer:
        lines = answer.iter_lines()
        for _ in range(6):
            next(lines)
        deadline = time.monotonic() + 60
        while live.metric("vllm:num_requests_running") != 2:
            assert time.monotonic() < deadline
    live.wait_until_idle()


def test_the_metrics_have_the_names_that_an_endpoint_picker_reads(live: LiveGateway) -> None:
    httpx.post(f"{live.url}/v1/generate", json=ASK, headers=live.headers, timeout=60)
    text = httpx.get(f"{live.url}/metrics", timeout=60).text
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total",
        "vllm:time_to_first_token_seconds_count",
    ):
        assert re.search(rf'^{name}{{engine="0",model_name="demo"}} ', text, re.MULTILINE), name
    assert re.search(r'^vllm:cache_config_info{block_size="32",.*num_gpu_blocks="[1-9]', text, re.MULTILINE)
    assert "vllm:gpu_cache_usage_perc" not in text


def test_nothing_of_vllm_is_on_the_gateways_output(live: LiveGateway) -> None:
    banner, *rest = live.output.read_text().splitlines()
    assert banner.startswith("Sluice on ") and rest
    strange = [line for line in rest if not line.startswith("  ")]
    assert not strange, strange


def test_a_start_that_fails_says_why_on_one_line(tmp_path: Path) -> None:
    with serving(tmp_path, SLUICE_ENGINE__MAX_MODEL_LEN="500000") as live:
        assert live.process.wait(START_TIMEOUT_S) == 1
        log = live.log.read_text()
    assert "engine.max_model_len: 500000" in log
    assert "Traceback" not in log


def test_a_termination_finishes_what_is_under_way_and_leaves_no_process(live: LiveGateway) -> None:
    """Runs after the other tests of the shared gateway, because it ends the gateway."""
    children = below(live)
    assert any("EngineCore" in child.name() for child in children)
    answers: list[httpx.Response] = []
    caller = threading.Thread(
        target=lambda: answers.append(
            httpx.post(f"{live.url}/v1/generate", json=LONG, headers=live.headers, timeout=120)
        )
    )
    caller.start()
    deadline = time.monotonic() + 60
    while not live.metric("vllm:num_requests_running"):
        assert caller.is_alive() and time.monotonic() < deadline
        time.sleep(0.02)
    live.process.send_signal(signal.SIGTERM)
    caller.join()
    assert answers[0].status_code == 200
    assert answers[0].json()["fallback"] is None
    assert live.process.wait(120) == 0
    assert all_gone(children)


def test_vllms_processes_end_with_a_gateway_that_is_killed(importing: LiveGateway) -> None:
    wait_ready(importing)
    children = below(importing)
    assert any("EngineCore" in child.name() for child in children)
    importing.process.kill()
    assert all_gone(children)
