"""The pool as an operator meets it: keys, headers, affinity over requests, figures, and the loop it runs on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from prometheus_client import CollectorRegistry

from adapters.values import Adapter
from gateway.backends.port import BackendState
from gateway.config.backends import HedgeSection, OpenAIBackend, TlsSection
from gateway.config.errors import ConfigError
from gateway.config.settings import load_settings
from gateway.contracts.features import Feature
from gateway.contracts.values import FormatType, ResponseFormat
from gateway.errors import InvalidRequest
from gateway.routing.file import RouteConfig, WeightedBackend
from gateway.routing.rank import rank
from gateway.routing.revision import Route
from observability.collectors import worker_families
from observability.scrape import ScrapeCollector
from resilience.failures import BackendFailure, FailureKind
from tests.conformance.harness import collect
from tests.integration.live import gateway
from tests.scripted import ScriptedBackend
from tests.workers.raw_worker import (
    RawWorker,
    Request,
    answers,
    make,
    make_pool,
    pool,
    refuses,
    state_of,
    until,
    work,
)

GOOD = answers("Hello", " there", prompt=5, cached=3)
ROOT = Path(__file__).parents[2]


async def test_usage_and_cached_tokens_are_the_workers_own() -> None:
    async with pool(RawWorker([GOOD])) as backend:
        completion = (await collect(backend, work("a longer prompt than five"))).completion
        assert (completion.usage.input_tokens, completion.usage.cached_tokens) == (5, 3)


async def test_the_key_is_sent_and_in_no_error() -> None:
    key, worker = "sk-worker-1234567890", RawWorker([refuses(401)])
    async with pool(worker, api_key_env="KEY", environ={"KEY": key}) as backend:
        with pytest.raises(BackendFailure, match="api_key_env") as caught:
            await collect(backend, work())
        assert worker.requests[0].headers["authorization"] == f"Bearer {key}"
        assert key not in str(caught.value) and key not in repr(state_of(backend))


async def test_a_key_that_cannot_be_sent_names_its_variable() -> None:
    for environ in ({"WORKER_KEY": "a\r\nb: c"}, {"WORKER_KEY": "ключ"}):
        with pytest.raises(ConfigError, match=r"backends\.worker\.api_key_env: .*WORKER_KEY"):
            make("http://127.0.0.1:1/v1", environ=environ, api_key_env="WORKER_KEY")


async def test_another_sluice_is_asked_for_errors_instead_of_fallbacks() -> None:
    worker = RawWorker([GOOD])
    async with pool(worker, dialect="sluice") as backend:
        await collect(backend, work())
    assert worker.requests[0].headers["prefer"] == "sluice-no-fallback"


async def test_connections_are_kept_and_used_again() -> None:
    worker = RawWorker([GOOD])
    async with pool(worker) as backend:
        for _ in range(10):
            await collect(backend, work())
        assert state_of(backend)[0].connections == 1


@pytest.mark.parametrize("header", [(), ("connection: close",)])
async def test_the_only_connection_that_a_worker_closes_after_each_answer_is_replaced_at_once(
    header: tuple[str, ...],
) -> None:
    async def once(request: Request) -> None:
        await request.whole(200, b"{}", *header)
        request.close()

    worker = RawWorker([once])
    await worker.start()
    backend = make(worker.url, max_connections=1)
    client = next(iter(backend._workers.values())).client
    for _ in range(20):
        answer = await client.get("/v1/tokens", timeout_s=30, body=b"{}")
        assert answer.status == 200
        await asyncio.sleep(0)  # the turn in which the closing is seen
    client.close()
    await worker.die()


async def test_a_connection_idle_for_long_is_not_used_again() -> None:
    worker = RawWorker([GOOD])
    async with pool(worker, keepalive_seconds=0.05) as backend:
        await collect(backend, work())
        await asyncio.sleep(0.1)
        await collect(backend, work())
        await until(lambda: state_of(backend)[0].connections == 1)


def conversation(name: str, turns: int) -> list[int]:
    text = f"{name} " * 20
    for turn in range(turns):
        text += f"turn {turn} of {name} " * 10
    return list(text.encode())


async def test_a_conversation_stays_where_its_beginning_is_cached() -> None:
    workers = [RawWorker([GOOD]) for _ in range(4)]
    async with pool(*workers, affinity_block_tokens=16) as backend:
        for turn in range(5):
            for name in ("ann", "bob", "cid", "dee", "eve", "fay"):
                await collect(backend, work(name, ids=conversation(name, turn)))
    homes = [Counter(request.body["messages"][0]["content"] for request in one.requests) for one in workers]
    for name in ("ann", "bob", "cid", "dee", "eve", "fay"):
        assert sorted(home[name] for home in homes) == [0, 0, 0, 5]


async def test_without_affinity_requests_take_turns() -> None:
    workers = [RawWorker([GOOD]) for _ in range(4)]
    async with pool(*workers, affinity=False) as backend:
        for _ in range(8):
            await collect(backend, work(ids=conversation("ann", 3)))
    assert [len(worker.requests) for worker in workers] == [2, 2, 2, 2]


async def test_one_busy_prefix_spreads_instead_of_queueing_up() -> None:
    workers = [RawWorker([answers("x", delay_s=0.1)]) for _ in range(4)]
    async with pool(*workers, affinity_block_tokens=16) as backend, asyncio.TaskGroup() as group:
        for _ in range(16):
            group.create_task(collect(backend, work(ids=conversation("ann", 3))))
    assert max(len(worker.requests) for worker in workers) <= 6


async def test_metrics_of_the_workers_make_the_pools_load() -> None:
    text = (
        'vllm:num_requests_running{engine="0"} 3\nvllm:num_requests_waiting{engine="0"} 2\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.5\n'
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1\n'
    )
    workers = [RawWorker([GOOD], metrics=text), RawWorker([GOOD], metrics=text)]
    async with pool(*workers) as backend:
        await until(lambda: all(one.running == 3 for one in state_of(backend)))
        load = backend.load
        assert load is not None
        assert (load.running, load.waiting, load.kv_usage) == (6, 4, 0.5)
        assert (load.total_blocks, load.block_size) == (200, 16)


async def test_every_worker_is_shown_in_the_metrics() -> None:
    there, gone = RawWorker([GOOD], metrics="vllm:num_requests_running 3\n"), RawWorker([GOOD])
    async with pool(there, gone, affinity=False) as backend:
        await until(lambda: state_of(backend)[0].running == 3)
        await gone.die()
        await until(lambda: state_of(backend)[1].state == "ejected")
        registry = CollectorRegistry()
        registry.register(ScrapeCollector(worker_families, lambda: {"pool": state_of(backend)}))
        labels = [{"backend": "pool", "worker": one.url} for one in (there, gone)]
        values = [registry.get_sample_value("sluice_worker_in_service", one) for one in labels]
        assert values == [1, 0]
        assert registry.get_sample_value("sluice_worker_running", labels[0]) == 3
        assert registry.get_sample_value("sluice_worker_running", labels[1]) is None
        assert registry.get_sample_value("sluice_worker_ejections_total", labels[1]) == 1


async def test_a_worker_whose_metrics_are_of_no_use_still_serves() -> None:
    async with pool(RawWorker([GOOD], metrics="<html>")) as backend:
        assert (await collect(backend, work())).text == "Hello there"
        assert backend.load is None, "nothing was told, so nothing is claimed"


async def test_a_server_without_a_health_path_is_asked_for_its_models() -> None:
    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                status = b"200 OK" if head.startswith(b"GET /v1/models ") else b"404 Not Found"
                writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(behave, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    serving = make_pool(f"http://127.0.0.1:{port}/v1")
    [backend] = serving.serving
    async with server, asyncio.TaskGroup() as group:
        loops = group.create_task(serving.run())
        await until(lambda: backend.state is BackendState.READY)
        loops.cancel()
    assert backend.state is BackendState.STOPPED


async def test_a_model_that_one_worker_lacks_is_looked_for_on_another_and_ejects_nobody() -> None:
    lacking, having = RawWorker([refuses(404)]), RawWorker([GOOD])
    adapter = Adapter("manga_v3", 1, "base", "/a")
    async with pool(lacking, having, affinity=False) as backend:
        for _ in range(8):
            assert (await collect(backend, work(adapter=adapter))).text == "Hello there"
        assert [one.ejections for one in state_of(backend)] == [0, 0]


@pytest.mark.parametrize("status", [400, 422])
async def test_bad_input_is_not_tried_on_another_worker(status: int) -> None:
    first, second = RawWorker([refuses(status)]), RawWorker([refuses(status)])
    async with pool(first, second, affinity=False) as backend:
        with pytest.raises(BackendFailure) as caught:
            await collect(backend, work())
        assert caught.value.kind is FailureKind.INVALID_INPUT
    assert len(first.requests) + len(second.requests) == 1


async def test_attempts_are_bounded_and_no_worker_is_tried_twice() -> None:
    workers = [RawWorker([refuses(503, None, "retry-after: 4")]) for _ in range(5)]
    async with pool(*workers, affinity=False, max_attempts=3) as backend:
        with pytest.raises(BackendFailure) as caught:
            await collect(backend, work())
        assert caught.value.kind is FailureKind.THROTTLED and caught.value.retry_after_s == 4
    assert sorted(len(worker.requests) for worker in workers) == [0, 0, 1, 1, 1]


async def test_a_shape_that_openai_has_no_field_for_is_refused_before_anything_is_sent() -> None:
    worker = RawWorker([GOOD])
    async with pool(worker, dialect="openai") as backend:
        with pytest.raises(BackendFailure) as caught:
            await collect(backend, work(response_format=ResponseFormat(FormatType.REGEX, "x")))
        assert (caught.value.kind, caught.value.param) == (FailureKind.INVALID_INPUT, "response_format")
    assert not worker.requests


@pytest.mark.parametrize("feature", list(Feature))
def test_what_a_backend_has_not_declared_is_refused_by_name_before_it_is_asked(feature: Feature) -> None:
    backend = ScriptedBackend("worker", features=frozenset(Feature) - {feature})
    config = RouteConfig(backends=[WeightedBackend(name="worker")])
    route = Route("r", config, (("worker", 100.0),))
    ranking = rank(route, sticky_key="s", asked=frozenset({feature}), backends={"worker": backend})
    with pytest.raises(InvalidRequest, match=feature.value) as caught:
        ranking.first()
    assert caught.value.param == feature.field and not backend.calls


def test_the_pool_works_on_uvloop_as_the_gateway_runs_it() -> None:
    async def scenario() -> None:
        dying, living = RawWorker([answers("x", delay_s=0.2)]), RawWorker([answers("x")])
        async with pool(dying, living, affinity=False) as backend:
            async with asyncio.TaskGroup() as group:
                answer = [group.create_task(collect(backend, work())) for _ in range(10)]
                await until(lambda: len(dying.requests) >= 2)
                await dying.die()
            assert [task.result().text for task in answer] == ["x"] * 10
            for _ in range(5):
                assert (await collect(backend, work())).text == "x"

    uvloop.run(scenario())


def settings_of(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "sluice.yaml"
    path.write_text(text)
    return load_settings(path, {})


def test_the_shortest_section_is_enough(tmp_path: Path) -> None:
    text = "backends: {worker: {kind: openai, base_urls: ['http://127.0.0.1:8001/v1'], model: base}}"
    section = settings_of(tmp_path, text).backends["worker"]
    assert isinstance(section, OpenAIBackend) and section.dialect == "auto"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kind: openai, model: base, base_urls: []", ["base_urls", "1 item or more"]),
        ("kind: openai, model: base, base_urls: [ftp://a/v1]", ["base_urls", "ftp://a/v1"]),
        ("kind: openai, model: base, base_urls: ['http://u:p@a/v1']", ["base_urls"]),
        ("kind: openai, model: base, base_urls: [http://a/v1, http://a/v1/]", ["named twice"]),
        ("kind: openai, model: '', base_urls: [http://a/v1]", ["model", "1 character"]),
        ("kind: openai, base_urls: [http://a/v1], model: b, dialect: x", ["dialect", "'vllm'"]),
        ("kind: openai, base_urls: [http://a/v1], model: b, features: [top_kk]", ["features", "top_kk"]),
        ("kind: openai, base_urls: [http://a/v1], model: b, modle: c", ["modle", "did you mean 'model'"]),
        ("kind: magic", ["magic", "'openai'"]),
    ],
)
def test_a_wrong_section_names_place_and_what_is_allowed(
    tmp_path: Path, text: str, expected: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_of(tmp_path, f"backends: {{worker: {{{text}}}}}")
    for part in ("backends.worker", *expected):
        assert part in str(caught.value)


def test_every_key_of_a_section_is_documented_with_its_default() -> None:
    rows = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    nested = {f"hedge.{key}": field for key, field in HedgeSection.model_fields.items()}
    nested |= {f"tls.{key}": field for key, field in TlsSection.model_fields.items()}
    for key, field in {**OpenAIBackend.model_fields, **nested}.items():
        if key in ("hedge", "tls"):
            continue
        if key in ("kind", "base_urls", "model", "adapters"):
            assert f"| `backends.<name>.{key}` |" in rows
            continue
        default = json.dumps(field.default).strip('"')
        assert f"| `backends.<name>.{key}` | `{default}` |" in rows, key


def test_a_gateway_without_an_engine_serves_through_a_worker_that_is_a_gateway(tmp_path: Path) -> None:
    (tmp_path / "behind").mkdir()
    with gateway(tmp_path / "behind") as inner:
        (tmp_path / "routing.yaml").write_text(
            "routes: {main: {backends: [{name: worker, weight: 100}], fallback: []}}\n"
        )
        (tmp_path / "sluice.yaml").write_text(
            "engine: {kind: none, tokenizer: models/demo, served_model_name: demo}\n"
            f"backends: {{worker: {{kind: openai, base_urls: ['{inner.url}/v1'], model: demo,"
            " api_key_env: SLUICE_ADMIN_KEY, probe_interval_seconds: 0.2},\n"
            f"  plain: {{kind: openai, base_urls: ['{inner.url}/v1'], model: demo, dialect: openai,"
            " api_key_env: SLUICE_ADMIN_KEY}}\n"
            f"routing: {{file: {tmp_path}/routing.yaml}}\n"
        )
        with gateway(tmp_path, config=tmp_path / "sluice.yaml") as front, httpx.Client(timeout=60) as client:
            deadline = time.monotonic() + 60
            while front.metric("sluice_worker_in_service") < 2:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            body = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12}
            answer = client.post(f"{front.url}/v1/chat/completions", json=body, headers=front.headers).json()
            direct = client.post(f"{inner.url}/v1/chat/completions", json=body, headers=front.headers).json()
            assert "choices" in answer, answer
            assert answer["choices"][0]["message"] == direct["choices"][0]["message"]
            assert answer["usage"]["completion_tokens"] == direct["usage"]["completion_tokens"]
            assert answer["sluice"]["backend"] == "openai"
            asked = {**body, "model": "plain", "top_k": 5}
            refused = client.post(f"{front.url}/v1/chat/completions", json=asked, headers=front.headers)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "top_k"
            with client.stream(
                "POST",
                f"{front.url}/v1/chat/completions",
                json={**body, "stream": True, "max_tokens": 2000},
                headers=front.headers,
            ) as stream:
                next(stream.iter_lines())
            inner.wait_until_idle()
            inner.process.kill()
            deadline = time.monotonic() + 60
            while client.get(f"{front.url}/ready").status_code == 200:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            gone = client.post(f"{front.url}/v1/chat/completions", json=body, headers=front.headers)
            assert gone.status_code == 503 and "retry-after" in gone.headers
