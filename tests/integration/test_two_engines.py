"""One gateway with two engines in its process tree, each with a model of its own."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.integration.live import LiveGateway, gateway

CONFIG = """
engines:
  large: {served_model_name: large-model, max_model_len: 2048, num_threads: 1, kv_cache_bytes: 33554432}
  vectors: {task: embed, served_model_name: vectors-model, num_threads: 1, kv_cache_bytes: 33554432}
  small: {served_model_name: small-model, max_model_len: 512, num_threads: 1, kv_cache_bytes: 33554432}
"""
BACK_TIMEOUT_S = 60.0


def chat(live: LiveGateway, model: str, words: int = 3) -> dict[str, Any]:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "word " * words}],
        "max_tokens": 4,
        "temperature": 0,
    }
    answer = httpx.post(f"{live.url}/v1/chat/completions", json=body, headers=live.headers, timeout=60)
    return {"status": answer.status_code, **answer.json()}


def states(live: LiveGateway) -> dict[str, str]:
    engines = httpx.get(f"{live.url}/ready", timeout=60).json()["engines"]
    return {name: one["state"] for name, one in engines.items()}


def test_each_engine_has_its_own_model_length_and_restart(tmp_path: Path) -> None:
    (tmp_path / "sluice.yaml").write_text(CONFIG)
    with gateway(tmp_path, config="") as live:
        assert states(live) == {"large": "ready", "vectors": "ready", "small": "ready"}
        listed = httpx.get(f"{live.url}/v1/models", headers=live.headers, timeout=60).json()["data"]
        lengths = {one["id"]: one["max_model_len"] for one in listed if one["parent"] is None}
        assert lengths == {"large-model": 2048, "vectors-model": 4096, "small-model": 512}
        for model in ("large-model", "small-model"):
            answer = chat(live, model)
            assert (answer["status"], answer["model"]) == (200, model), answer
        refused = chat(live, "small-model", 900)
        assert refused["status"] == 400 and refused["error"]["code"] == "context_length_exceeded"
        assert chat(live, "large-model", 900)["status"] == 200
        assert chat(live, "demo")["status"] == 404

        assert "generates no text" in chat(live, "vectors-model")["error"]["message"]
        asked = {"model": "vectors-model", "input": "a text"}
        made = httpx.post(f"{live.url}/v1/embeddings", json=asked, headers=live.headers, timeout=60)
        assert made.status_code == 200 and made.json()["data"][0]["embedding"]
        deep = httpx.get(f"{live.url}/health/deep", headers=live.headers, timeout=60).json()
        assert deep["status"] == "healthy", deep

        processes = psutil.Process(live.process.pid).children()
        engines = [one for one in processes if "engine.process" in " ".join(one.cmdline())]
        assert len(engines) == 3
        engines[0].kill()
        deadline = time.monotonic() + BACK_TIMEOUT_S
        while not (away := [name for name, state in states(live).items() if state != "ready"]):
            assert time.monotonic() < deadline, live.log.read_text()
        [dead] = away
        other = "small" if dead == "large" else "large"
        while states(live)[dead] != "ready":
            assert chat(live, f"{other}-model")["status"] == 200, "the other engines serve on"
            assert time.monotonic() < deadline, live.log.read_text()
        if dead != "vectors":
            assert chat(live, f"{dead}-model")["status"] == 200
        text = httpx.get(f"{live.url}/metrics", timeout=60).text
        # If the kernel has just killed another test's process for memory, that is given as this restart's reason.
        assert re.search(rf'sluice_engine_restarts_total{{backend="{dead}",reason="\w+"}} 1.0', text)
        assert live.metric("sluice_engine_restarts_total") == 1, "the other engines were not restarted"
        assert 'vllm:num_requests_running{engine="0",model_name="small-model"}' in text
