"""The container's contract, on a real gateway started as SageMaker starts it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import parse_qs

import httpx
import psutil
import pytest

from gateway.config.errors import ConfigError
from gateway.config.settings import load_settings
from ops.sagemaker.container import container_environment, log_level
from tests.deploy.dockerfiles import read_dockerfile
from tests.fork_server import ForkedPopen
from tests.integration.live import ROOT, environment
from tests.sse import json_events

START_TIMEOUT_S = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class CloudWatch:
    """A fake CloudWatch: records the request bodies of the service's query or JSON protocol."""

    def __init__(self) -> None:
        self.bodies: list[str] = []
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                import gzip

                body = self.rfile.read(int(self.headers["content-length"]))
                unpacked = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
                bodies.append(unpacked.decode("utf-8", "replace"))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                """Logs nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def container(folder: Path, **env: str) -> Iterator[tuple[str, subprocess.Popen[str], Path]]:
    """Runs the image's entry point with only the platform's argument and environment."""
    entry = json.loads(read_dockerfile(ROOT / "deploy/sagemaker/Dockerfile").runtime.last("ENTRYPOINT"))
    assert entry[0] == "sluice"
    port, log = free_port(), folder / "log"
    clean = environment(env)
    for name in ("SLUICE_ADMIN_KEY", "SLUICE_SERVER__PORT"):
        clean.pop(name)
    clean |= {
        "SAGEMAKER_BIND_TO_PORT": str(port),
        "SLUICE_CONFIG": str(ROOT / "sluice.yaml"),
        "SLUICE_STATE__URL": f"sqlite:///{folder}/state.db",
        "SLUICE_LEDGER__URL": f"sqlite+aiosqlite:///{folder}/ledger.db",
    }
    with log.open("w") as out:
        process = ForkedPopen(
            [sys.executable, "-m", "ops.cli", *entry[1:], "serve"],
            cwd=ROOT,
            env=clean,
            stdout=out,
            stderr=out,
            text=True,
        )
    try:
        yield f"http://127.0.0.1:{port}", process, log
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(90)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def pings_until_healthy(url: str, process: subprocess.Popen[str], log: Path) -> list[int]:
    """Pings like the platform's health check until the status is 200; returns every status."""
    seen: list[int] = []
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end and seen[-1:] != [200]:
        assert process.poll() is None, log.read_text()
        try:
            seen.append(httpx.get(f"{url}/ping", timeout=60).status_code)
        except httpx.TransportError:
            time.sleep(0.01)
    assert seen[-1:] == [200], log.read_text()
    return seen


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, list[int], CloudWatch, subprocess.Popen[str]]]:
    cloud = CloudWatch()
    try:
        with container(
            tmp_path_factory.mktemp("sagemaker"),
            SLUICE_SAGEMAKER_ENDPOINT="sluice-test",
            SLUICE_SAGEMAKER_PUBLISH_SECONDS="0.2",
            AWS_ENDPOINT_URL=cloud.url,
            AWS_ACCESS_KEY_ID="x",
            AWS_SECRET_ACCESS_KEY="x",
            AWS_DEFAULT_REGION="us-east-1",
            AWS_EC2_METADATA_DISABLED="true",
            HTTP_PROXY="http://127.0.0.1:1",
        ) as (url, process, log):
            yield url, pings_until_healthy(url, process, log), cloud, process
    finally:
        cloud.close()


Served = tuple[str, list[int], CloudWatch, "subprocess.Popen[str]"]
BODY = {"messages": [{"role": "user", "content": "Who wrote Berserk?"}], "sampling": {"max_tokens": 12}}


def test_no_instance_is_sent_traffic_before_its_model_is_loaded(served: Served) -> None:
    url, seen, _, _ = served
    assert 503 in seen and set(seen) == {503, 200}
    # The first request after a healthy ping gets a real answer.
    assert httpx.get(f"{url}/ready", timeout=60).status_code == 200


def test_an_invocation_is_the_native_contract_without_a_key(served: Served) -> None:
    url, _, _, _ = served
    answer = httpx.post(f"{url}/invocations", json=BODY, timeout=60)
    assert answer.status_code == 200
    assert answer.json()["backend"] == "embedded" and answer.json()["usage"]["output_tokens"] > 0


def test_an_invocation_with_a_response_stream_is_a_stream(served: Served) -> None:
    """InvokeEndpointWithResponseStream passes the body on as it arrives."""
    url, _, _, _ = served
    with httpx.stream("POST", f"{url}/invocations", json={**BODY, "stream": True}, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert "content-length" not in answer.headers
        events = list(json_events(answer.iter_lines()))
    assert [event["type"] for event in events[:-1]] == ["token"] * (len(events) - 1)
    assert len(events) > 2 and events[-1]["type"] == "done"


def test_a_bad_invocation_is_a_client_error_with_a_code(served: Served) -> None:
    url, _, _, _ = served
    answer = httpx.post(f"{url}/invocations", json={"nonsense": 1}, timeout=60)
    assert answer.status_code == 422 and answer.json()["error"]["code"] == "invalid_request"


def test_what_the_endpoint_scales_on_reaches_cloudwatch_also_where_a_proxy_is_set(served: Served) -> None:
    _, _, cloud, _ = served
    end = time.monotonic() + 60
    while not cloud.bodies and time.monotonic() < end:
        time.sleep(0.05)
    assert cloud.bodies
    sent = cloud.bodies[-1] + json.dumps(parse_qs(cloud.bodies[-1]))
    for word in ("ActiveSequences", "WaitingRequests", "sluice-test"):
        assert word in sent


def test_the_container_drains_and_ends_when_it_is_stopped(served: Served) -> None:
    """The last test of the shared gateway, because it ends the gateway."""
    url, _, _, process = served
    publishers = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGTERM)
    assert process.wait(90) == 0
    _, alive = psutil.wait_procs(publishers, timeout=30)
    assert alive == [], "what publishes ends with the gateway"
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/ping", timeout=60)


def test_the_platforms_environment_is_the_gateways_configuration(tmp_path: Path) -> None:
    made = container_environment(
        {"SAGEMAKER_BIND_TO_PORT": "8088", "MAX_NUM_SEQS": "7"}, model_folder=tmp_path
    )
    settings = load_settings(None, made)
    assert (settings.server.host, settings.server.port, settings.server.ping) == (
        "0.0.0.0",
        8088,
        "once_ready",
    )
    assert settings.auth.enabled is False and settings.server.drain_seconds < 30
    assert settings.engine.max_num_seqs == 7 and settings.engine.model == "models/demo"
    (tmp_path / "config.json").write_text("{}")
    assert load_settings(None, container_environment({}, model_folder=tmp_path)).engine.model == str(tmp_path)
    assert container_environment({}, model_folder=tmp_path)["SLUICE_SERVER__PORT"] == "8080"


def test_a_variable_that_the_operator_set_is_kept(tmp_path: Path) -> None:
    made = container_environment(
        {"SLUICE_ENGINE__MODEL": "org/name", "SLUICE_SERVER__PING": "alive"}, model_folder=tmp_path
    )
    assert (made["SLUICE_ENGINE__MODEL"], made["SLUICE_SERVER__PING"]) == ("org/name", "alive")


def test_a_multi_model_endpoint_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="SAGEMAKER_MULTI_MODEL"):
        container_environment({"SAGEMAKER_MULTI_MODEL": "true"})


@pytest.mark.parametrize(
    ("given", "level"), [("10", "debug"), ("30", "warning"), ("", "info"), ("loud", "info")]
)
def test_the_platforms_log_level_is_a_word_here(given: str, level: str) -> None:
    assert log_level({"SAGEMAKER_CONTAINER_LOG_LEVEL": given}) == level
