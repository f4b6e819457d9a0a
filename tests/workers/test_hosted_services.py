"""Hosted services as workers: keys, headers, TLS, proxies, and pauses that they ask for with 429."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
import socket
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
import yaml

from gateway.backends.workers.api_key import ApiKey, UnusableKey
from gateway.backends.workers.errors import ConnectFailed
from gateway.backends.workers.header_template import HeaderTemplate
from gateway.config.backends import OpenAIBackend
from gateway.config.errors import ConfigError
from gateway.config.settings import Settings, load_settings
from gateway.wiring.build import build
from gateway.wiring.worker_connections import check_key_variables, make_connections
from resilience.failures import BackendFailure, FailureKind
from tests.integration.live import gateway
from tests.workers.authority import Authority, TunnelProxy
from tests.workers.raw_worker import (
    RawWorker,
    Request,
    answers,
    make_pool,
    pool,
    refuses,
    state_of,
    until,
    work,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


async def text_of(backend: Any, **changes: Any) -> str:
    pieces: list[str] = []

    async def keep(delta: Any) -> None:
        pieces.append(delta.text)

    await backend.generate(work(**changes), keep)
    return "".join(pieces)


def section(**changes: Any) -> OpenAIBackend:
    return OpenAIBackend.model_validate(
        {"kind": "openai", "base_urls": ["https://api.example/v1"], "model": "base", **changes}
    )


async def status_of(url: str, environ: dict[str, str] | None = None, **changes: Any) -> int:
    """The status of one request over a connection as the configuration says."""
    made = section(base_urls=[url], **changes)
    client = make_connections("hosted", made, (), environ or {}).client(url, 1, 30)
    try:
        return (await client.get("/health", timeout_s=30)).status
    finally:
        client.close()


# TLS


async def test_a_private_authority_and_a_client_certificate_make_a_service_reachable(
    authority: Authority,
) -> None:
    service = RawWorker([answers("hi")], tls=authority.server("service", "127.0.0.1", clients=True))
    cert_file, key_file = authority.pair("gateway")
    tls = {"ca_file": authority.ca_file, "cert_file": cert_file, "key_file": key_file}
    async with pool(service, tls=tls) as backend:
        assert await text_of(backend) == "hi"
        with pytest.raises(ConnectFailed):
            await status_of(service.url)
        # TLS 1.3 tells the client only with the first answer that its certificate is missing.
        with pytest.raises(Exception, match=r"connection") as caught:
            await status_of(service.url, tls={"ca_file": authority.ca_file})
        assert type(caught.value).__module__ == "gateway.backends.workers.errors"


async def test_the_certificates_name_must_be_the_address_or_server_name(authority: Authority) -> None:
    service = RawWorker([answers("hi")], tls=authority.server("service.internal"))
    await service.start()
    try:
        with pytest.raises(ConnectFailed):
            await status_of(service.url, tls={"ca_file": authority.ca_file})
        tls = {"ca_file": authority.ca_file, "server_name": "service.internal"}
        assert await status_of(service.url, tls=tls) == 200
    finally:
        await service.die()


@pytest.mark.parametrize(
    ("tls", "named"),
    [({"ca_file": "gone.pem"}, "ca_file: gone.pem is no file"), ({"ca_file": __file__}, "ca_file")],
)
def test_a_certificate_that_cannot_be_used_is_named_at_the_start(tls: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"backends\.hosted\.tls\.{re.escape(named)}"):
        make_connections("hosted", section(tls=tls), (), {})


# Proxies


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("proxy_tls", [False, True])
def test_a_service_is_reached_through_a_tunnel_of_a_proxy(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, loop: Any, proxy_tls: bool
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", authority.ca_file)  # the system's authorities, for the proxy

    async def scenario() -> None:
        service = RawWorker([answers("hi")], tls=authority.server("service", "127.0.0.1"))
        tls: dict[str, Any] = {"tls": {"ca_file": authority.ca_file}}
        await service.start()
        context = authority.server("proxy", "127.0.0.1") if proxy_tls else None
        async with TunnelProxy().running(context) as proxy:
            scheme = "https" if proxy_tls else "http"
            assert await status_of(service.url, proxy=f"{scheme}://127.0.0.1:{proxy.port}", **tls) == 200
            assert proxy.heads[0].startswith(f"CONNECT 127.0.0.1:{service.port} HTTP/1.1\r\n")
            environ = {"HTTPS_PROXY": f"{scheme}://jo:p%40ss@127.0.0.1:{proxy.port}"}
            assert await status_of(service.url, environ, proxy="environment", **tls) == 200
            named = base64.b64encode(b"jo:p@ss").decode()
            assert f"proxy-authorization: Basic {named}" in proxy.heads[1]
            without = {**environ, "NO_PROXY": "127.0.0.1"}
            assert await status_of(service.url, without, proxy="environment", **tls) == 200
            assert await status_of(service.url, environ, **tls) == 200
            assert len(proxy.heads) == 2, "NO_PROXY, and a backend that does not ask for the environment"
        await service.die()

    run(scenario(), loop)


def run(scenario: Coroutine[Any, Any, None], loop: Any) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scenario)


@pytest.mark.parametrize(("status", "said"), [(407, "user and password"), (502, "answered 502")])
async def test_a_proxy_that_refuses_is_a_failed_connection_that_says_so(status: int, said: str) -> None:
    async with TunnelProxy(status).running() as proxy:
        with pytest.raises(ConnectFailed, match=said):
            await status_of("https://service.internal/v1", proxy=f"http://127.0.0.1:{proxy.port}")


# Connections


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_request_cancelled_in_the_moment_its_connection_is_made_leaves_none_counted(loop: Any) -> None:
    async def scenario() -> None:
        service = RawWorker([answers("hi")])
        await service.start()
        made = section(base_urls=[service.url])
        client = make_connections("hosted", made, (), {}).client(service.url, 1, 30)
        async with asyncio.TaskGroup() as group:
            leaving = group.create_task(client.get("/health", timeout_s=30))
            while not client.open:  # noqa: ASYNC110 - the moment is one turn of the event loop
                await asyncio.sleep(0)
            leaving.cancel()
        await until(lambda: not client.open)
        assert (await client.get("/health", timeout_s=30)).status == 200, "it may have one connection"
        client.close()
        await service.die()

    run(scenario(), loop)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_busy_event_loop_does_not_make_a_worker_unreachable(loop: Any) -> None:
    async def scenario() -> None:
        service = RawWorker([answers("hi")])
        await service.start()
        made = section(base_urls=[service.url])
        client = make_connections("hosted", made, (), {}).client(service.url, 1, 0.05)
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(client.get("/health", timeout_s=30))
            for _ in range(6):  # each step of connecting takes longer than the limit
                await asyncio.sleep(0)
                time.sleep(0.2)  # noqa: ASYNC251 - other requests' work
        assert asking.result().status == 200
        client.close()
        await service.die()

    run(scenario(), loop)


async def test_a_worker_that_takes_no_connection_is_unreachable_within_the_limit() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        with contextlib.ExitStack() as waiting:
            for _ in range(4):  # more than the backlog takes
                one = waiting.enter_context(socket.socket())
                one.setblocking(False)
                one.connect_ex(address)
            url = f"http://127.0.0.1:{address[1]}/v1"
            client = make_connections("hosted", section(base_urls=[url]), (), {}).client(url, 1, 0.1)
            with pytest.raises(ConnectFailed, match=r"within 0\.1 s"):
                await client.get("/health", timeout_s=30)


# Keys and headers


async def test_the_key_of_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("one\n")
    key = ApiKey(path=path, reload_s=0.005)
    assert key.line == b"authorization: Bearer one\r\n"
    async with asyncio.TaskGroup() as loops:
        watch = loops.create_task(key.watch())
        path.write_text("two\n")
        await until(lambda: key.line == b"authorization: Bearer two\r\n")
        path.write_text("")
        await asyncio.sleep(0.05)
        assert key.line == b"authorization: Bearer two\r\n", "an empty file is no key"
        path.unlink()
        await asyncio.sleep(0.05)
        path.write_text("three")
        await until(lambda: key.line == b"authorization: Bearer three\r\n")
        watch.cancel()


@pytest.mark.parametrize("content", ["", " \n", "two words", "käse", "a\nb"])
def test_a_key_file_that_holds_no_key_is_refused_without_its_content(tmp_path: Path, content: str) -> None:
    path = tmp_path / "key"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"backends\.hosted\.api_key_file: .*key: ") as caught:
        make_connections("hosted", section(api_key_file=str(path)), (), {})
    assert not content.strip() or content.strip() not in str(caught.value)
    with pytest.raises(UnusableKey, match="cannot be read"):
        ApiKey(path=tmp_path / "gone")


def test_all_variables_of_keys_that_are_not_set_are_named_at_once() -> None:
    backends = {f"b{number}": section(api_key_env=f"KEY_{number}") for number in range(4)}
    with pytest.raises(ConfigError) as caught:
        check_key_variables({**backends, "open": section()}, {"KEY_0": "k", "KEY_2": ""})
    assert [line.partition(" is not set")[0] for line in str(caught.value).splitlines()] == [
        f"backends.b{number}.api_key_env: the variable KEY_{number}" for number in (1, 2, 3)
    ]


async def test_headers_are_sent_with_fields_of_the_request_and_none_of_the_callers_own() -> None:
    service = RawWorker([answers("hi")])
    headers = {"OpenAI-Organization": "org-1", "X-For": "{tenant}/{session_id}", "X-Request": "{request_id}"}
    async with pool(service, headers=headers, dialect="openai") as backend:
        await text_of(backend, tenant="acme", session_id="日本 50%", request_id="r-1")
        await text_of(backend, tenant="acme")
    first, second = (one.headers for one in service.requests)
    assert first["openai-organization"] == second["openai-organization"] == "org-1"
    assert first["x-for"] == "acme/%E6%97%A5%E6%9C%AC 50%25" and first["x-request"] == "r-1"
    assert {"x-for", "x-request", "authorization"} & second.keys() == set(), "a field that is not there"


@pytest.mark.parametrize("value", ["a\r\nx-admin: 1", "a\0", "x" * 257])
def test_a_field_that_no_header_may_have_is_bad_input_by_its_name(value: str) -> None:
    with pytest.raises(BackendFailure) as caught:
        HeaderTemplate("x-session", "{session_id}").line(work(session_id=value))
    assert (caught.value.kind, caught.value.param) == (FailureKind.INVALID_INPUT, "session_id")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"headers": {"Authorization": "secret"}}, "api_key_env or api_key_file"),
        ({"headers": {"Host": "a"}}, "written by the gateway"),
        ({"headers": {"x y": "a"}}, "no header's name"),
        ({"headers": {"x": "secret {nobody}"}}, "{session_id}"),
        ({"headers": {"x": "secret\r\nx-admin: 1"}}, "printable"),
        ({"headers": {"x": "a", "X": "b"}}, "named twice"),
        ({"proxy": "http://jo:secret@proxy:3128"}, "HTTPS_PROXY"),
        ({"proxy": "socks5://proxy"}, "http://HOST:PORT"),
        ({"api_key_env": "K", "api_key_file": "/f"}, "one of both"),
        ({"tls": {"key_file": "k"}}, "cert_file"),
        ({"tls": {"verify": False}}, "server_name"),
        ({"base_urls": ["http://a/v1"], "tls": {"server_name": "b"}}, "none of base_urls is https://"),
    ],
)
def test_a_wrong_setting_is_refused_by_name_and_without_its_value(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    hosted = {"kind": "openai", "base_urls": ["https://api.example/v1"], "model": "base", **changes}
    (tmp_path / "sluice.yaml").write_text(yaml.safe_dump({"backends": {"hosted": hosted}}))
    with pytest.raises(ConfigError, match=re.escape(named)) as caught:
        load_settings(tmp_path / "sluice.yaml", {})
    assert "backends.hosted" in str(caught.value) and "secret" not in str(caught.value)


# Throttling


async def test_a_service_that_asks_for_a_pause_gets_no_requests_meanwhile_and_another_answers() -> None:
    busy, idle = RawWorker([refuses(429, None, "retry-after: 600")]), RawWorker([answers("hi")])
    async with pool(busy, idle, dialect="openai", affinity=False) as backend:
        for _ in range(6):
            assert await text_of(backend) == "hi"
        assert len(busy.requests) == 1 and len(idle.requests) == 6
        weights = {one.url: one.weight for one in state_of(backend)}
        assert weights == {busy.url: 0.0, idle.url: 1.0}


async def test_the_only_service_in_a_pause_fails_at_once_and_is_asked_again_after_the_pause() -> None:
    refused = refuses(429, None, "retry-after: 10", "retry-after-ms: 200500")
    service = RawWorker([refused, answers("hi")])
    async with pool(service, dialect="openai") as backend:
        for _ in range(2):
            with pytest.raises(BackendFailure) as caught:
                await text_of(backend)
            assert caught.value.kind is FailureKind.THROTTLED and not caught.value.counts
            assert 100 <= (caught.value.retry_after_s or 0) <= 200.5
            assert len(service.requests) == 1
        [worker] = backend._workers.values()
        backend._pool._resting_until[worker.url] = asyncio.get_running_loop().time()  # as if it were over
        assert not backend.pauses
        assert await text_of(backend) == "hi"


async def test_a_pause_that_a_service_asks_for_one_model_is_none_for_its_others() -> None:
    async def limits_a(request: Request) -> None:
        await (refuses(429, None, "retry-after: 60") if request.body["model"] == "a" else answers("hi"))(
            request
        )

    models = b'{"data": [{"id": "a"}, {"id": "b"}]}'
    service = RawWorker([limits_a], models=lambda: models)
    await service.start()
    serving = make_pool(service.url, model=None, dialect="openai")
    async with asyncio.TaskGroup() as group:
        loops = group.create_task(serving.run())
        await until(lambda: len(serving.serving) == 2 and serving.status()[0].state == "in_service")
        backends = {one.model: one for one in serving.serving}
        for _ in range(2):
            with pytest.raises(BackendFailure):
                await text_of(backends["a"])
            assert await text_of(backends["b"]) == "hi"
        assert [request.body["model"] for request in service.requests] == ["a", "b", "b"]
        assert serving.status()[0].weight == 0.0, "operators see the pause"
        assert {model: one.pauses for model, one in backends.items()} == {"a": True, "b": False}
        loops.cancel()
    await service.die()


@pytest.mark.parametrize("others", [0, 1])
async def test_a_model_that_fails_takes_no_other_from_its_worker(others: int) -> None:
    async def fails_at_a(request: Request) -> None:
        await (refuses(500) if request.body["model"] == "a" else answers("hi"))(request)

    models = b'{"data": [{"id": "a"}, {"id": "b"}]}'
    failing = RawWorker([fails_at_a], models=lambda: models)
    good = [RawWorker([answers("hi")], models=lambda: models) for _ in range(others)]
    for worker in (failing, *good):
        await worker.start()
    urls = [worker.url for worker in (failing, *good)]
    serving = make_pool(*urls, model=None, dialect="openai", affinity=False, eject_seconds=600)
    async with asyncio.TaskGroup() as group:
        loops = group.create_task(serving.run())
        await until(
            lambda: len(serving.serving) == 2 and {one.state for one in serving.status()} == {"in_service"}
        )
        backends = {one.model: one for one in serving.serving}
        for _ in range(20):
            if others:
                assert await text_of(backends["a"]) == "hi"
            else:
                with pytest.raises(BackendFailure) as caught:
                    await text_of(backends["a"])
                assert caught.value.kind is FailureKind.INTERNAL and caught.value.counts
        for _ in range(4):
            assert await text_of(backends["b"]) == "hi"
        assert {request.body["model"] for request in failing.requests} == {"a", "b"}
        assert [one.ejections for one in serving.status()] == [0] * len(urls)
        asked = [request.body["model"] for request in failing.requests].count("a")
        assert asked == (3 if others else 20), "another worker gets the model's requests after three failures"
        loops.cancel()
    for worker in (failing, *good):
        await worker.die()


async def test_another_sluice_that_refuses_one_request_gets_the_next() -> None:
    service = RawWorker([refuses(503, None, "retry-after: 600"), answers("hi")])
    async with pool(service, dialect="sluice") as backend:
        with pytest.raises(BackendFailure):
            await text_of(backend)
        assert await text_of(backend) == "hi"


@pytest.mark.parametrize(
    ("status", "error"),
    [(429, {"code": "insufficient_quota"}), (429, {"type": "insufficient_quota"}), (402, {})],
)
async def test_a_used_up_quota_is_not_tried_again(status: int, error: dict[str, str]) -> None:
    workers = [
        RawWorker([refuses(status, {"error": {"message": "You exceeded", **error}})]) for _ in range(2)
    ]
    async with pool(*workers, dialect="openai") as backend:
        with pytest.raises(BackendFailure, match="quota") as caught:
            await text_of(backend)
    assert sum(len(one.requests) for one in workers) == 1
    assert caught.value.no_retry_here and caught.value.retry_after_s == 60.0


async def test_a_service_without_metrics_is_not_asked_for_them_each_second() -> None:
    service = RawWorker([answers("hi")], statuses={"/health": 404})
    async with pool(service, probe_path="/ready", metrics_path="/health", metrics_interval_seconds=0.01):
        await until(lambda: service.probes > 0)
        await asyncio.sleep(0.3)
        assert service.probes == 1


def hosted_example(number: int = 0) -> str:
    text = (ROOT / "docs/workers.md").read_text(encoding="utf-8").partition("## Hosted services")[2]
    return re.findall(r"```yaml\n(.*?)```", text, re.S)[number]


def test_the_documented_example_is_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "sluice.yaml").write_text(hosted_example())
    settings: Settings = load_settings(tmp_path / "sluice.yaml", {})
    assert list(settings.backends) == ["gpus", "hosted"]
    hosted = settings.backends["hosted"]
    assert isinstance(hosted, OpenAIBackend) and hosted.dialect == "openai" and hosted.price is not None


async def test_self_hosted_first_and_hosted_as_overflow_is_one_route(
    tmp_path: Path, authority: Authority
) -> None:
    hosted = RawWorker(
        [answers("hosted"), refuses(429, None, "retry-after: 40")],
        tls=authority.server("service", "127.0.0.1"),
        models=lambda: b'{"data": [{"id": "gpt-4o-mini"}]}',
    )
    gpu = RawWorker([refuses(503, None, "retry-after: 1")], models=lambda: b'{"data": [{"id": "base"}]}')
    await gpu.start()
    await hosted.start()
    (tmp_path / "key").write_text("sk-1")
    config = yaml.safe_load(hosted_example())
    config["engine"]["tokenizer"] = "models/demo"
    config["backends"]["gpus"] |= {"base_urls": [gpu.url], "model": "base"}
    config["backends"]["hosted"] |= {
        "base_urls": [hosted.url],
        "tls": {"ca_file": authority.ca_file},
        "api_key_file": str(tmp_path / "key"),
    }
    del config["backends"]["hosted"]["proxy"]
    config["routing"] = {"file": str(tmp_path / "routing.yaml")}
    (tmp_path / "sluice.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "routing.yaml").write_text(hosted_example(1))
    started = gateway(tmp_path, config=tmp_path / "sluice.yaml")
    live = await asyncio.to_thread(started.__enter__)
    try:
        async with httpx.AsyncClient(base_url=live.url, headers=live.headers, timeout=60) as client:
            deadline = time.monotonic() + 60
            while live.metric("sluice_worker_in_service") < 2:  # the gateway is ready with one of the two
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            body = {"model": "base", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
            answer = (await client.post("/v1/chat/completions", json=body)).json()
            assert "choices" in answer, answer
            assert answer["choices"][0]["message"]["content"] == "hosted"
            assert answer["sluice"]["backend_name"] == "hosted"
            sent = hosted.requests[0]
            assert sent.headers["authorization"] == "Bearer sk-1"
            assert sent.headers["openai-organization"] and sent.headers["x-tenant"]
            refused = await client.post("/v1/chat/completions", json=body)
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1", "of the GPUs"
            body["model"] = "hosted"
            for _ in range(2):
                refused = await client.post("/v1/chat/completions", json=body)
                assert refused.status_code == 503, refused.text
                assert 20 <= int(refused.headers["retry-after"]) <= 40
            assert len(hosted.requests) == 2, "not while it asks for a pause"
    finally:
        await asyncio.to_thread(started.__exit__, None, None, None)
        await gpu.die()
        await hosted.die()


@pytest.mark.parametrize("dialect", ["openai", "vllm"])
def test_two_pools_may_have_the_same_model_whose_tokenizer_is_not_known(tmp_path: Path, dialect: str) -> None:
    hosted = {"kind": "openai", "base_urls": ["https://a.invalid/v1"], "model": "m", "dialect": "openai"}
    other = {**hosted, "base_urls": ["https://b.invalid/v1"], "dialect": dialect}
    settings = Settings.model_validate(
        {
            "engine": {"kind": "none"},
            "state": {"url": "memory://"},
            "ledger": {"url": f"sqlite+aiosqlite:///{tmp_path / 'ledger.db'}"},
            "backends": {"hosted": hosted, "other": other},
        }
    )
    assert list(build(settings, admin_key="k" * 32).core.backends.fleet.backends) == ["hosted", "other"]
