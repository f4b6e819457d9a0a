"""One gateway in front of two workers, each with a model of its own."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.images.samples import data_url, sample
from tests.integration.live import ADMIN_KEY, LiveGateway, gateway
from tests.workers.raw_worker import RawWorker, answers

TOOL = {"type": "function", "function": {"name": "stock", "parameters": {"type": "object"}}}
START_TIMEOUT_S = 120.0


def worker(model: str, length: int) -> RawWorker:
    """A worker that lists this model and answers with its name."""
    listed = json.dumps({"data": [{"id": model, "max_model_len": length}]}).encode()
    return RawWorker([answers("I am ", model)], models=partial(bytes, listed))


def wait_for_workers(live: LiveGateway) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while live.metric("sluice_worker_in_service") < 2:
        assert time.monotonic() < deadline, live.log.read_text()
        time.sleep(0.05)


@asynccontextmanager
async def serving(folder: Path, large: RawWorker, small: RawWorker) -> AsyncIterator[LiveGateway]:
    """Run a gateway with both workers in service; the model of the second backend is not configured."""
    for one in (large, small):
        await one.start()
    pool = {"kind": "openai", "dialect": "vllm", "prompt": "messages"}
    config = {
        "engine": {"kind": "none"},
        "backends": {
            "first": {**pool, "base_urls": [large.url], "model": "large-70b"},
            "second": {**pool, "base_urls": [small.url]},
        },
        "models": {
            "large-70b": {"aliases": ["gpt-4o"], "images": {}},
            "small-1b": {"aliases": ["gpt-4o-mini"], "backends": ["second"], "capabilities": []},
        },
        "routing": {"file": str(folder / "routing.yaml")},
    }
    route = {"backends": [{"name": "first", "weight": 100}], "fallback": ["second"]}
    (folder / "routing.yaml").write_text(yaml.safe_dump({"routes": {"self_hosted_generation": route}}))
    (folder / "sluice.yaml").write_text(yaml.safe_dump(config))
    manager = gateway(folder, config=folder / "sluice.yaml")
    live = await asyncio.to_thread(manager.__enter__)
    try:
        await asyncio.to_thread(wait_for_workers, live)
        yield live
    finally:
        await asyncio.to_thread(manager.__exit__, None, None, None)
        for one in (large, small):
            await one.die()


async def ask_about_images(ask: Callable[..., Awaitable[httpx.Response]], large: RawWorker) -> None:
    """The worker gets the image itself, never a URL; the gateway does not fetch from a private address."""

    def shown(url: str) -> list[dict[str, Any]]:
        image = {"type": "image_url", "image_url": {"url": url}}
        return [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]}]

    asked = len(large.requests)
    given = data_url(sample("png"), "image/jpeg")
    assert (await ask("large-70b", messages=shown(given))).status_code == 200
    [parts] = [one["content"] for one in large.requests[-1].body["messages"]]
    assert parts[1] == {"type": "image_url", "image_url": {"url": data_url(sample("png"))}}
    for url in (f"{large.url}/models", "http://169.254.169.254/latest/meta-data/"):
        refused = (await ask("large-70b", messages=shown(url))).json()["error"]
        assert refused["param"] == "messages.0.content.1.image_url.url"
        assert "is at a host that is not known or not public" in refused["message"]
    refused = (await ask("small-1b", messages=shown(given))).json()["error"]
    assert refused["param"] == "messages" and "messages with images" in refused["message"]
    assert len(large.requests) == asked + 1


async def test_each_model_answers_under_its_names_and_a_key_has_only_its_own(tmp_path: Path) -> None:
    large, small = worker("large-70b", 4096), worker("small-1b", 512)
    async with serving(tmp_path, large, small) as live, httpx.AsyncClient(timeout=60) as client:

        async def ask(model: str, key: str = ADMIN_KEY, **more: Any) -> httpx.Response:
            body = {"model": model, "messages": [{"role": "user", "content": "Who are you?"}], **more}
            headers = {"Authorization": f"Bearer {key}"}
            return await client.post(f"{live.url}/v1/chat/completions", json=body, headers=headers)

        async def lengths(key: str) -> dict[str, int]:
            headers = {"Authorization": f"Bearer {key}"}
            listed = (await client.get(f"{live.url}/v1/models", headers=headers)).json()["data"]
            return {one["id"]: one["max_model_len"] for one in listed}

        for name, model in {
            "large-70b": "large-70b",
            "gpt-4o": "large-70b",
            "first": "large-70b",
            "small-1b": "small-1b",
            "gpt-4o-mini": "small-1b",
            "second": "small-1b",
        }.items():
            answer = (await ask(name)).json()
            assert (answer["model"], answer["choices"][0]["message"]["content"]) == (model, f"I am {model}")
        assert [request.body["model"] for request in large.requests] == ["large-70b"] * 3
        assert [request.body["model"] for request in small.requests] == ["small-1b"] * 3

        unknown = await ask("gpt-4o-mimi")
        assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "model_not_found"
        assert "did you mean gpt-4o-mini" in unknown.json()["error"]["message"]
        refused = await ask("small-1b", tools=[TOOL])
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools"
        assert (await ask("large-70b", tools=[TOOL])).status_code == 200

        await ask_about_images(ask, large)
        everything = await lengths(ADMIN_KEY)
        assert everything.keys() == {"large-70b", "gpt-4o", "first", "small-1b", "gpt-4o-mini", "second"}
        assert (everything["large-70b"], everything["small-1b"]) == (4096, 512)

        made = await client.post(
            f"{live.url}/admin/keys",
            json={"tenant": "acme", "models": ["small-1b"], "aliases": {"gpt-5": "small-1b"}},
            headers=live.headers,
        )
        key = made.json()["key"]
        assert (await lengths(key)).keys() == {"small-1b", "gpt-4o-mini", "second", "gpt-5"}
        assert (await ask("gpt-5", key)).json()["model"] == "small-1b"
        hidden = await ask("large-70b", key)
        suggested = re.findall(r"[\w-]+", hidden.json()["error"]["message"].split(";")[1])
        assert hidden.status_code == 404 and not {"large-70b", "gpt-4o", "first"} & {*suggested}

        before = len(small.requests)
        await large.die()
        over = await ask("large-70b")
        assert (over.json()["model"], len(small.requests)) == ("small-1b", before + 1)
