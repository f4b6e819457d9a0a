"""The tokenizer and the length that the gateway uses for a model that its workers list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from budgeting.values import Message, Role
from gateway.backends.port import Work
from gateway.backends.workers.inspection import ServedModel
from gateway.config.backends import OpenAIBackend
from gateway.config.settings import Settings
from gateway.contracts.values import Sampling
from gateway.prompts.canonical import Canonicalizer
from gateway.prompts.text import Models, ModelText
from gateway.wiring.model import Tokenizers
from gateway.wiring.served_models import ServedModels

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "models" / "demo"
POOL = {"pool": {"kind": "openai", "base_urls": ["http://127.0.0.1:9/v1"]}}


class Gateway:
    """The parts of a gateway that handle a model found on a worker."""

    def __init__(self, **sections: Any) -> None:
        self.settings = Settings.model_validate({"backends": POOL, **sections})
        engine = self.settings.engine
        most = self.settings.server.max_body_bytes
        tokenizers, canonicalizer = (
            Tokenizers({engine.tokenizer_folder}, max_body_bytes=most, cache_bytes=1 << 20),
            Canonicalizer(),
        )
        default = ModelText(tokenizers.of(engine.tokenizer_folder), engine.max_model_len, canonicalizer)
        self.models = Models(default)
        self.found = ServedModels(self.settings, self.models, tokenizers, canonicalizer, lambda: 0.0)


async def test_a_readable_folder_of_the_worker_is_the_models_tokenizer() -> None:
    gateway = Gateway()
    reading = await gateway.found.read("pool", ServedModel("qwen", 2048, str(DEMO)), 2048)
    assert reading.check is not None and reading.check.samples
    assert gateway.models.of("qwen").max_model_len == 2048
    assert gateway.models.of("qwen").tokenizer is not gateway.models.default.tokenizer


@pytest.mark.parametrize(
    "root", [None, "/nowhere", "org/model-that-nobody-has-fetched", "not a repo/id", "x" * 300]
)
async def test_without_a_tokenizer_prompts_are_estimated_and_sent_as_messages(root: str | None) -> None:
    gateway = Gateway()
    reading = await gateway.found.read("pool", ServedModel("qwen", 2048, root), 2048)
    assert gateway.models.of("qwen").tokenizer.encoder == "an estimate (±30%)"
    assert reading.check is None


async def test_the_named_tokenizer_of_the_engine_counts_for_all() -> None:
    gateway = Gateway(engine={"tokenizer": str(DEMO)})
    await gateway.found.read("pool", ServedModel("qwen", 2048), 2048)
    assert gateway.models.of("qwen").tokenizer is gateway.models.default.tokenizer


async def test_a_damaged_tokenizer_of_the_worker_does_not_take_the_model_away(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    gateway = Gateway()
    await gateway.found.read("pool", ServedModel("qwen", 2048, str(tmp_path)), 2048)
    assert gateway.models.of("qwen").tokenizer.encoder == "an estimate (±30%)"


async def test_an_estimate_learns_from_what_the_workers_report() -> None:
    gateway = Gateway()
    reading = await gateway.found.read("pool", ServedModel("qwen", 2048), 2048)
    assert reading.learn is not None
    said = Message(Role.USER, "word " * 400)
    before = len(gateway.models.of("qwen").tokenizer.encode_parts([said], ()).token_ids)
    for _ in range(50):
        reading.learn(Work("gen_1", (), (said,), Sampling()), 250)
    counter = gateway.models.of("qwen").tokenizer
    assert before > 500
    assert len(counter.encode_parts([said], ()).token_ids) == pytest.approx(250, abs=2)
    assert counter.encoder == "an estimate (±5%)"


async def test_a_hosted_services_model_is_estimated_from_the_start() -> None:
    hosted = {"kind": "openai", "base_urls": ["http://127.0.0.1:9/v1"], "dialect": "openai", "model": "gpt"}
    gateway = Gateway(backends={"hosted": hosted})
    section = gateway.settings.backends["hosted"]
    assert isinstance(section, OpenAIBackend)
    reading = gateway.found.hosted(section)
    assert reading is not None and reading.learn is not None
    assert gateway.models.of("gpt").tokenizer.encoder == "an estimate (±30%)"
    named = Gateway(backends={"hosted": hosted}, models={"gpt": {"tokenizer": str(DEMO)}})
    assert named.found.hosted(section) is None


@pytest.mark.parametrize(
    ("sections", "reported", "length"),
    [
        ({}, 2048, 2048),
        ({}, 100_000, 100_000),
        ({}, None, 4096),
        ({"engine": {"max_model_len": 1024}}, 2048, 1024),
        ({"models": {"qwen": {"max_model_len": 512}}}, 2048, 512),
        ({"models": {"qwen": {"max_model_len": 4000}}}, 2048, 2048),
    ],
)
async def test_what_is_configured_bounds_what_the_worker_reports(
    sections: dict[str, Any], reported: int | None, length: int
) -> None:
    gateway = Gateway(**sections)
    await gateway.found.read("pool", ServedModel("qwen", reported), reported)
    assert gateway.models.of("qwen").max_model_len == length


async def test_a_model_is_as_long_as_the_shortest_pool_that_serves_it_and_forgotten_with_the_last() -> None:
    gateway = Gateway()
    await gateway.found.read("short", ServedModel("qwen", 1024), 1024)
    await gateway.found.read("long", ServedModel("qwen", 2048), 2048)
    assert gateway.models.of("qwen").max_model_len == 1024
    gateway.found.forget("short", {"qwen", "another"})
    assert gateway.models.of("qwen").max_model_len == 2048
    gateway.found.forget("long", {"qwen"})
    assert not gateway.models.own


async def test_the_section_of_an_engine_in_process_says_nothing_of_the_workers_models() -> None:
    engine = {"kind": "embedded", "model": str(DEMO), "max_model_len": 512}
    gateway = Gateway(engine=engine, backends={"local": {"kind": "engine"}, **POOL})
    await gateway.found.read("pool", ServedModel("qwen", 2048), 2048)
    assert gateway.models.of("qwen").max_model_len == 2048
    assert gateway.models.of("qwen").tokenizer.encoder == "an estimate (±30%)"
    await gateway.found.read("pool", ServedModel("other", 4096, str(DEMO)), 4096)
    assert (
        gateway.models.of("other").tokenizer is gateway.models.default.tokenizer
    )  # the same folder is read once
    assert (gateway.models.of("other").max_model_len, gateway.models.of("demo").max_model_len) == (4096, 512)


def test_no_engine_is_loaded_where_only_workers_are_named() -> None:
    assert Gateway().settings.engine.kind == "none"
    assert Settings.model_validate({}).engine.kind == "embedded"
    both = {**POOL, "local": {"kind": "engine"}}
    assert Settings.model_validate({"backends": both}).engine.kind == "embedded"
