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
from ops.cli.init import worker_configuration
from tests.workers.raw_worker import RawWorker, answers

FOLDER = str(BUNDLED / "demo")


def model(name: str, **facts: Any) -> dict[str, Any]:
    return {"id": name, "root": FOLDER, "owned_by": "vllm", **facts}


async def learned(*lists: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """From workers with these lists of models."""
    async with contextlib.AsyncExitStack() as opened:
        urls = []
        for listed in lists:
            body = json.dumps({"data": listed}).encode()
            worker = RawWorker([answers()], models=partial(bytes, body))
            await worker.start()
            opened.push_async_callback(worker.die)
            urls.append(worker.url)
        return await asyncio.to_thread(worker_configuration, urls, {})


async def test_the_shortest_length_of_the_workers_holds_and_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = await learned([model("base", max_model_len=4096)], [model("base", max_model_len=2048)])
    assert found["engine"]["max_model_len"] == 2048
    said = capsys.readouterr().err
    assert "4096" in said and "the shortest holds: 2048" in said


async def test_equal_lengths_need_no_words(capsys: pytest.CaptureFixture[str]) -> None:
    found = await learned([model("base", max_model_len=512)], [model("base", max_model_len=512)])
    assert found["engine"]["max_model_len"] == 512 and not capsys.readouterr().err


async def test_a_length_that_only_the_second_worker_says_is_taken() -> None:
    found = await learned([model("base")], [model("base", max_model_len=2048)])
    assert found["engine"]["max_model_len"] == 2048


async def test_several_models_are_named_and_nothing_is_chosen() -> None:
    other = model("small", root="/models/small")
    with pytest.raises(ConfigError, match=r"several models \(base, small\); write .* one backend for each"):
        await learned([model("base"), other])


async def test_names_of_one_folder_and_adapters_are_one_model() -> None:
    listed = [model("base"), model("alias"), model("lora", root="/loras/a", parent="base")]
    found = await learned(listed)
    assert found["backends"]["worker"]["model"] == "base"


async def test_of_another_sluice_the_first_model_is_taken() -> None:
    own = {"owned_by": "sluice"}
    found = await learned([model("base", **own), model("small", root="small", **own)])
    assert found["backends"]["worker"]["model"] == "base"
