"""What ``sluice serve --worker`` and ``sluice init --worker`` learn from the workers' lists of models."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from gateway.config.engine import BUNDLED
from gateway.config.errors import ConfigError
from gateway.config.settings import Settings
from ops.cli.init import worker_configuration
from tests.workers.raw_worker import RawWorker, answers

FOLDER = str(BUNDLED / "demo")


def model(name: str, **facts: Any) -> dict[str, Any]:
    return {"id": name, "root": FOLDER, "owned_by": "vllm", **facts}


async def learned(*lists: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The configuration that the gateway writes for workers with these lists of models."""
    async with contextlib.AsyncExitStack() as opened:
        urls = []
        for listed in lists:
            body = json.dumps({"data": listed}).encode()
            worker = RawWorker([answers()], models=partial(bytes, body))
            await worker.start()
            opened.push_async_callback(worker.die)
            urls.append(worker.url)
        return await asyncio.to_thread(worker_configuration, urls, {})


async def test_the_length_is_learned_while_the_gateway_runs() -> None:
    found = await learned([model("base", max_model_len=4096)], [model("base", max_model_len=2048)])
    assert found["engine"] == {"kind": "none", "served_model_name": "base", "tokenizer": FOLDER}


async def test_of_several_models_each_is_learned_while_the_gateway_runs() -> None:
    other = model("small", root="/models/small")
    for lists in ([[model("base"), other]], [[model("base")], [other]]):
        found = await learned(*lists)
        assert found["backends"]["worker"].keys() == {"kind", "base_urls"} and "engine" not in found
        Settings.model_validate(found)


async def test_a_worker_that_lists_only_an_adapter_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"/models: lists no model; load one first"):
        await learned([model("lora", parent="base")])


async def test_names_of_one_folder_and_adapters_are_one_model() -> None:
    listed = [model("base"), model("alias"), model("lora", root="/loras/a", parent="base")]
    found = await learned(listed)
    assert found["backends"]["worker"]["model"] == "base"


async def test_an_alias_at_another_sluice_is_no_second_model() -> None:
    own = {"owned_by": "sluice", "root": "base"}
    found = await learned([model("alias", **own), model("base", **own)])
    assert found["backends"]["worker"]["model"] == "base"


def test_a_worker_that_does_not_answer_is_named_with_the_variable_for_its_key() -> None:
    with pytest.raises(ConfigError) as caught:
        worker_configuration(["http://127.0.0.1:1"], {})
    assert "http://127.0.0.1:1/v1: no answer" in str(caught.value)
    assert str(caught.value).endswith("is the worker running there? (a key for it goes to WORKER_API_KEY)")


async def test_a_worker_that_refuses_the_key_is_named_by_its_url() -> None:
    worker = RawWorker([answers()], keyed=frozenset({"/v1/models"}))
    await worker.start()
    with pytest.raises(ConfigError, match=f"--worker: {worker.url}: 401 .*WORKER_API_KEY"):
        await asyncio.to_thread(worker_configuration, [worker.url], {})
    await worker.die()
