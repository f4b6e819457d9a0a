"""A gateway in front of one pool whose workers serve different models: the request's model picks the workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from structlog.testing import capture_logs

from gateway.app import create_app
from gateway.config.engine import BUNDLED
from gateway.config.settings import Settings
from gateway.wiring.build import build
from gateway.wiring.running import Gateway
from observability.metrics_text import samples_of
from tests.workers.raw_worker import QUICK, RawWorker, answers, refuses, until

FOLDER = str(BUNDLED / "demo")
KEY = "test-admin-key-0123456789abcdef0123456789abcdef"


@dataclass(frozen=True)
class Pool:
    """A gateway: one worker lists two models, another the second only; tests may change ``listed``."""

    gateway: Gateway
    client: httpx.AsyncClient
    listed: dict[str, dict[str, int]]
    workers: Mapping[str, RawWorker]

    async def ask(self, model: str, **fields: Any) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": "Which one?"}], **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def shown(self) -> dict[str, int]:
        data = (await self.client.get("/v1/models")).json()["data"]
        return {one["id"]: one["max_model_len"] for one in data}

    async def follow(self) -> None:
        """Ask the workers for their models, as the gateway does every 30 seconds."""
        await self.gateway.serving.inspections.now()


def listing(models: Mapping[str, int]) -> bytes:
    return json.dumps(
        {
            "data": [
                {"id": name, "max_model_len": length, "root": f"/{name}"}
                | ({"parent": "big"} if name.startswith("lora") else {})
                for name, length in models.items()
            ]
        }
    ).encode()


@asynccontextmanager
async def pool(folder: Path, **sections: Any) -> AsyncIterator[Pool]:
    listed = {"first": {"big": 4096, "small": 1024}, "second": {"small": 512}}
    workers = {
        name: RawWorker([answers(name)], models=lambda name=name: listing(listed[name]))  # type: ignore[misc]
        for name in listed
    }
    for worker in workers.values():
        await worker.start()
    (folder / "routing.yaml").write_text("routes: {chat: {backends: [{name: gpus}]}}")
    settings = Settings.model_validate(
        {
            "backends": {
                "gpus": {"kind": "openai", "base_urls": [one.url for one in workers.values()], **QUICK}
            },
            "state": {"url": f"sqlite:///{folder}/s.db"},
            "ledger": {"url": f"sqlite+aiosqlite:///{folder}/l.db"},
            "routing": {"file": str(folder / "routing.yaml")},
            **sections,
        }
    )
    gateway = build(settings, admin_key=KEY)
    transport = httpx.ASGITransport(app=create_app(gateway.services))
    headers = {"Authorization": f"Bearer {KEY}"}
    async with (
        gateway.running(),
        httpx.AsyncClient(transport=transport, base_url="http://g", headers=headers, timeout=60) as client,
    ):
        [serving] = gateway.core.backends.engines.pools.values()
        await until(lambda: all(one.state == "in_service" for one in serving.status()))
        await until(lambda: len(serving.serving) == 2)
        yield Pool(gateway, client, listed, workers)
    for worker in workers.values():
        await worker.die()


async def test_the_model_of_a_request_picks_the_workers_and_everything_is_by_model(tmp_path: Path) -> None:
    small = {"tokenizer": FOLDER, "price": {"input_usd_per_million": 1.0, "output_usd_per_million": 2.0}}
    async with pool(tmp_path, models={"small": {**small, "aliases": ["mini"]}}) as here:
        assert await here.shown() == {
            "big": 4096,
            "gpus/big": 4096,
            "small": 512,
            "gpus/small": 512,
            "mini": 512,
        }
        big = (await here.ask("big")).json()
        assert (big["model"], big["sluice"]["backend_name"]) == ("big", "gpus/big")
        assert big["choices"][0]["message"]["content"] == "first"
        said = set()
        for _ in range(4):
            small = (await here.ask("mini")).json()
            assert (small["model"], small["sluice"]["backend_name"]) == ("small", "gpus/small")
            said.add(small["choices"][0]["message"]["content"])
        assert said == {"first", "second"}
        asked = {
            name: [one.body["model"] for one in worker.requests] for name, worker in here.workers.items()
        }
        assert asked["first"].count("big") == 1 and set(asked["second"]) == {"small"}

        # A request can name a backend of the pool as its model, but not the pool itself.
        assert (await here.ask("gpus/small")).json()["model"] == "small"
        unknown = await here.ask("gpus")
        assert unknown.status_code == 404 and "did you mean gpus/" in unknown.json()["error"]["message"]

        # A prompt that is too long for one model fits the other.
        long = "word " * 600
        messages = [{"role": "user", "content": long}]
        assert (await here.ask("big", messages=messages)).status_code == 200
        too_long = await here.ask("small", messages=messages)
        assert too_long.status_code == 400 and "511 that fit" in too_long.json()["error"]["message"]

        # The ledger writes rows with a short delay.
        for _ in range(3000):
            usage = (await here.client.get("/admin/usage", params={"by": "backend,model"})).json()["rows"]
            costs = {(row["backend"], row["model"]): row["cost_nanousd"] > 0 for row in usage}
            if costs == {("gpus/big", "big"): False, ("gpus/small", "small"): True}:
                break
            await asyncio.sleep(0.01)
        else:
            raise AssertionError(usage)
        metrics = (await here.client.get("/metrics")).text
        counted = {one.labels["backend"] for one in samples_of(metrics, "sluice_requests_total") if one.value}
        assert {"gpus/big", "gpus/small"} <= counted
        ready = (await here.client.get("/ready")).json()
        assert ready["workers"]["gpus/small"] == {"usable": 2, "of": 2}
        # Only one of the two models has a tokenizer on this machine.
        deep = await here.client.get("/health/deep")
        states = {name: one["status"] for name, one in deep.json()["backends"].items()}
        assert (deep.status_code, states) == (200, {"gpus/big": "healthy", "gpus/small": "healthy"})


async def test_a_new_model_is_served_and_a_gone_one_is_not_found_without_a_restart(tmp_path: Path) -> None:
    async with pool(tmp_path) as here:
        here.listed["second"] = {"tiny-chat": 256}
        await here.follow()
        assert (await here.ask("tiny-chat", max_tokens=8)).json()["choices"][0]["message"][
            "content"
        ] == "second"
        assert (await here.ask("small")).json()["choices"][0]["message"]["content"] == "first"
        await here.follow()
        assert (await here.shown())["small"] == 1024  # the worker with the shorter length is gone
        here.listed["first"] = {"big": 4096}
        await here.follow()
        gone = await here.ask("small")
        assert gone.status_code == 404 and gone.json()["error"]["code"] == "model_not_found"
        near = await here.ask("tiny-chap")
        assert "tiny-chat" in near.json()["error"]["message"]
        here.listed["second"] = {"big": 4096}
        await here.follow()
        assert await here.shown() == {"big": 4096, "gpus": 4096}
        assert not here.gateway.core.backends.admission.gates  # they were of models that are gone
        assert (await here.ask("gpus")).json()["sluice"]["backend_name"] == "gpus"


async def test_one_models_outage_leaves_the_other_model_alone(tmp_path: Path) -> None:
    async with pool(tmp_path) as here:
        here.listed["first"] = {"big": 4096}
        await here.follow()
        # On a busy machine the deadline below may pass before admission, which makes the model's gate.
        assert (await here.ask("small")).status_code == 200
        await here.workers["second"].die()
        failed = await here.ask("small", sluice={"deadline_ms": 300})
        assert failed.status_code in (503, 504)
        assert (await here.ask("big")).status_code == 200
        gates = here.gateway.core.backends.admission.gates
        assert set(gates) == {"gpus/big", "gpus/small"}


async def test_a_models_failed_worker_is_logged_under_the_name_of_the_models_backend(tmp_path: Path) -> None:
    async with pool(tmp_path) as here:
        for worker in here.workers.values():
            worker.behaviours[:] = [refuses(500)]
        with capture_logs() as logs:
            await here.ask("small")
        assert {one["backend"] for one in logs if one["event"] == "worker failed"} == {"gpus/small"}


async def test_requests_under_way_are_answered_while_models_come_and_go(tmp_path: Path) -> None:
    async with pool(tmp_path) as here:
        here.workers["first"].behaviours[:] = [answers("a", "b", "c", delay_s=0.02)]
        done: list[int] = []

        async def ask_again() -> None:
            while len(done) < 60:
                done.append((await here.ask("big")).status_code)

        async with asyncio.TaskGroup() as group:
            for _ in range(6):
                group.create_task(ask_again())
            while len(done) < 60:
                for models in ({"big": 4096}, {"big": 4096, "small": 1024}):
                    here.listed["first"] = here.listed["second"] = models
                    await here.follow()
                here.listed["second"] = {"other": 256}
                await here.follow()
        assert set(done) == {200}
        rows = here.gateway.core.accounts.ledger
        await until(lambda: rows.depth == 0)
        usage = (await here.client.get("/admin/usage", params={"by": "backend"})).json()["rows"]
        assert {row["backend"] for row in usage} <= {"gpus", "gpus/big"}
        assert sum(row["requests"] for row in usage) == len(done)
        assert not any(gate.in_flight for gate in here.gateway.core.backends.admission.gates.values())


async def test_an_adapter_that_one_worker_lists_is_asked_for_there_alone_by_its_name(tmp_path: Path) -> None:
    async with pool(tmp_path) as served:
        served.listed.update(first={"big": 4096}, second={"big": 4096, "lora-style": 4096})
        await served.follow()
        before = len(served.workers["first"].requests)
        for _ in range(4):
            answer = (await served.ask("lora-style")).json()
            assert (answer["model"], answer["choices"][0]["message"]["content"]) == ("lora-style", "second")
        assert len(served.workers["first"].requests) == before
        assert {one.body["model"] for one in served.workers["second"].requests[-4:]} == {"lora-style"}
        card = (await served.client.get("/v1/models/lora-style")).json()
        assert (card["parent"], card["root"], card["max_model_len"]) == ("big", "lora-style", 4096)

        del served.listed["second"]["lora-style"]
        await served.follow()
        gone = await served.ask("lora-style")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
        assert "lora-style" not in await served.shown()


async def test_an_adapter_whose_workers_are_gone_is_refused_for_that_reason_and_its_model_stays(
    tmp_path: Path,
) -> None:
    async with pool(tmp_path) as served:
        served.listed.update(first={"big": 4096}, second={"big": 4096, "lora-style": 4096})
        await served.follow()
        await served.workers["second"].die()
        [serving] = served.gateway.core.backends.engines.pools.values()
        await until(lambda: "in_service" not in [one.state for one in serving.status()][1:])
        for _ in range(8):
            refused = await served.ask("lora-style")
            assert refused.status_code == 503
            assert "no worker of gpus with the adapter is in service" in refused.json()["error"]["message"]
        assert (await served.ask("big")).status_code == 200


async def test_names_that_gateways_gave_to_loaded_adapters_are_not_the_workers_own(tmp_path: Path) -> None:
    async with pool(tmp_path) as served:
        served.listed["first"] = {"big": 4096, "lora-style@0123456789ab": 4096}
        await served.follow()
        assert not [name for name in await served.shown() if name.startswith("lora")]
