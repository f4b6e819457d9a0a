"""A real gateway with Bedrock, played by the stand-in, as a backend."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.bedrock.stand_in import ANSWER, Behaviour, StandIn
from tests import fork_server
from tests.bedrock.conftest import CREDENTIALS, HAIKU
from tests.integration.live import ROOT, LiveGateway, environment, gateway
from tests.sse import json_events

ASKED = {"messages": [{"role": "user", "content": "Something like Vinland Saga?"}]}
ROUTE = {"prompt_version": "chat-manga-2.1", "slo": {"ttft_ms": 200, "total_ms": 1400}}


def config(folder: Path, bedrock: StandIn, *, engine: str) -> Path:
    """Write the files of a gateway whose only route falls back to Bedrock, or has only Bedrock."""
    settings = yaml.safe_load((ROOT / "sluice.yaml").read_text())
    settings["engine"]["kind"] = engine
    settings["backends"] = {
        "bedrock": {"kind": "bedrock", "model_id": HAIKU, "region": "us-east-1", "endpoint_url": bedrock.url}
    }
    if engine == "embedded":
        settings["backends"]["local"] = {"kind": "engine"}
        route = {**ROUTE, "backends": [{"name": "local", "weight": 100}], "fallback": ["bedrock", "degraded"]}
    else:
        route = {**ROUTE, "backends": [{"name": "bedrock", "weight": 100}], "fallback": ["degraded"]}
    (folder / "routing.yaml").write_text(yaml.safe_dump({"routes": {"self_hosted_generation": route}}))
    settings["routing"] = {"file": str(folder / "routing.yaml")}
    (folder / "sluice.yaml").write_text(yaml.safe_dump(settings))
    return folder / "sluice.yaml"


def ask(live: LiveGateway, path: str = "/v1/generate", **body: Any) -> httpx.Response:
    return httpx.post(f"{live.url}{path}", json={**ASKED, **body}, headers=live.headers, timeout=60)


@pytest.mark.timeout(600)
def test_bedrock_answers_when_the_engine_is_dead(tmp_path: Path, bedrock: StandIn) -> None:
    dead = {"SLUICE_ENGINE__MAX_RESTARTS_PER_HOUR": "0"}  # a dead engine is not restarted
    at = config(tmp_path, bedrock, engine="embedded")
    with gateway(tmp_path, config=at, **CREDENTIALS, **dead) as live:
        assert ask(live).json()["backend"] == "embedded"
        os.kill(live.engine_pid(), signal.SIGKILL)
        answer = ask(live).json()
        assert answer["backend"] == "bedrock" and answer["output_text"] == "".join(ANSWER)
        assert answer["fallback"]["kind"] == "bedrock"
        assert answer["usage"]["output_tokens"] == len(ANSWER)
        assert answer["backend_version"] == HAIKU


@pytest.mark.timeout(600)
def test_a_gateway_may_have_bedrock_alone(tmp_path: Path, bedrock: StandIn) -> None:
    with gateway(tmp_path, config=config(tmp_path, bedrock, engine="none"), **CREDENTIALS) as live:
        plain = ask(live).json()
        assert (plain["backend"], plain["finish_reason"]) == ("bedrock", "stop")
        assert "You are" in bedrock.last["system"][0]["text"], "the prompt version's system text"

        hot = ask(live, sampling={"temperature": 1.7, "top_k": 5, "max_tokens": 3}).json()
        assert hot["output_text"] == "".join(ANSWER[:3]) and hot["finish_reason"] == "length"
        assert bedrock.last["inferenceConfig"] == {"maxTokens": 3, "temperature": 1.0}
        assert sorted(warning.split()[0] for warning in hot["warnings"]) == ["temperature", "top_k"]

        refused = ask(live, "/v1/chat/completions", model="bedrock", temperature=1.7)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "temperature"

        with httpx.stream(
            "POST",
            f"{live.url}/v1/generate",
            json={**ASKED, "stream": True},
            headers=live.headers,
            timeout=60,
        ) as stream:
            events = list(json_events(stream.iter_lines()))
        assert "".join(event["delta"] for event in events if event["type"] == "token") == "".join(ANSWER)
        assert events[-1]["type"] == "done"

        bedrock.script(Behaviour(stop_reason="model_context_window_exceeded"))
        cut = ask(live, "/v1/messages", model="bedrock", max_tokens=100).json()
        assert cut["stop_reason"] == "model_context_window_exceeded"

        _loops_through_a_tool(live, bedrock)

        bedrock.script(Behaviour(status=429, error="ThrottlingException"))
        throttled = ask(live).json()
        assert throttled["fallback"] == {
            "kind": "degraded_response",
            "reason": "throttled",
            "retry_after_ms": None,
        }
        deep = httpx.get(f"{live.url}/health/deep", headers=live.headers, timeout=60)
        assert deep.status_code == 200, deep.text


def _loops_through_a_tool(live: LiveGateway, bedrock: StandIn) -> None:
    """Check a chat that calls a tool, whole and streamed, and answers with its result."""
    tools = [{"type": "function", "function": {"name": "stock.of", "parameters": {"type": "object"}}}]
    chat = {"model": "bedrock", "tools": tools, "parallel_tool_calls": False}

    def model(request: dict[str, Any]) -> Behaviour:
        if any("toolResult" in block for block in request["messages"][-1]["content"]):
            return Behaviour(pieces=("Four",))
        name = request["toolConfig"]["tools"][0]["toolSpec"]["name"]
        return Behaviour(pieces=(), reasoning=("Hm",), calls=((name, ('{"sku":', '"A1"}')), (name, ("{}",))))

    bedrock.model = model
    answer = ask(live, "/v1/chat/completions", **chat).json()
    message = answer["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "stock.of", "arguments": '{"sku":"A1"}'}
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert "1 more were left out" in " ".join(answer["sluice"]["warnings"])
    with httpx.stream(
        "POST",
        f"{live.url}/v1/chat/completions",
        json={**ASKED, **chat, "stream": True},
        headers=live.headers,
        timeout=60,
    ) as stream:
        chunks = [chunk for chunk in json_events(stream.iter_lines()) if chunk["choices"]]
    deltas = [piece for chunk in chunks for piece in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert [piece["function"]["name"] for piece in deltas if "name" in piece["function"]] == ["stock.of"]
    assert "".join(piece["function"].get("arguments", "") for piece in deltas) == '{"sku":"A1"}'
    history = [*ASKED["messages"], message, {"role": "tool", "tool_call_id": call["id"], "content": "4"}]
    last = ask(live, "/v1/chat/completions", **chat, messages=history).json()
    assert last["choices"][0]["message"]["content"] == "Four"
    bedrock.model = None


@pytest.mark.timeout(600)
def test_a_stop_does_not_wait_for_a_call_that_hangs(tmp_path: Path, bedrock: StandIn) -> None:
    file = config(tmp_path, bedrock, engine="none")
    bedrock.always["us-east-1"] = Behaviour(fault="hang")
    env = {**CREDENTIALS, "SLUICE_SERVER__DRAIN_SECONDS": "1"}
    with gateway(tmp_path, config=file, **env) as live, ThreadPoolExecutor(1) as caller:
        asked = caller.submit(ask, live)
        while not bedrock.seen:
            time.sleep(0.01)
        live.process.send_signal(signal.SIGTERM)
        started_at = time.monotonic()
        live.process.wait(60)
        assert time.monotonic() - started_at < 30, "the read timeout alone would take a minute"
        with contextlib.suppress(httpx.TransportError):
            assert asked.result().status_code >= 500


@pytest.mark.timeout(600)
def test_the_doctor_tells_whether_bedrock_may_be_used(tmp_path: Path, bedrock: StandIn) -> None:
    file = config(tmp_path, bedrock, engine="none")

    def examined() -> tuple[int, dict[str, Any]]:
        databases = {
            "SLUICE_STATE__URL": f"sqlite:///{tmp_path}/s.db",
            "SLUICE_LEDGER__URL": f"sqlite+aiosqlite:///{tmp_path}/l.db",
        }
        done = fork_server.run(
            [sys.executable, "-m", "ops.cli", "doctor", "--config", str(file), "--json"],
            cwd=ROOT,
            env=environment(CREDENTIALS | databases),
            timeout=120,
        )
        checks = json.loads(done.stdout)["checks"]
        return done.returncode, next(one for one in checks if one["check"].startswith("Bedrock access"))

    code, found = examined()
    assert (code, found["ok"]) == (0, True), found
    bedrock.script(Behaviour(status=403, error="AccessDeniedException", message="no bedrock:InvokeModel"))
    code, found = examined()
    assert (code, found["ok"]) == (1, False) and "bedrock:InvokeModel" in found["detail"]
