"""The demo adapters: each answers in its own style, trained on dialogues that the evaluation does not contain."""

from __future__ import annotations

import json
import random
import re
from itertools import islice
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file
from transformers import AutoTokenizer

from adapters.base_model import base_model
from adapters.verify import verify
from engine.build import build_engine
from engine.values import EngineConfig, GenerationRequest
from evaluation.adapter_regression.__main__ import PROMPTS
from evaluation.adapter_regression.prompts import load_prompts
from evaluation.demo_eval import load_questions
from gateway.shadow.language import has_japanese
from models.adapter_styles import (
    DOMAIN_OPEN,
    JAPANESE_CLOSE,
    STYLES,
    SUPPORT_CLOSE,
    SUPPORT_OPEN,
    styled_dialogues,
)
from models.train_adapters import main as train
from tests.engine.support import DEMO_MODEL, REPOSITORY, greedy, run_to_end

FOLDER = REPOSITORY / "models" / "adapters"
QUESTION = "Who wrote Monster?"


def normalised(text: str) -> str:
    return re.sub(r"[\W_]+", " ", text.lower()).strip()


@pytest.fixture(scope="module")
def answers() -> dict[str, str]:
    """The answers of the base model and of each adapter to one question, in one batch."""
    engine = build_engine(EngineConfig(str(DEMO_MODEL), num_threads=1, num_blocks=256, max_loras=3))
    for name in STYLES:
        engine.install_adapter(name, engine.read_adapter(FOLDER / name))
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True
    )
    prompt = tuple(tokenizer.encode(text, add_special_tokens=False))
    requests = [
        GenerationRequest(name, prompt, greedy(96), adapter_id=None if name == "base" else name)
        for name in ("base", *STYLES)
    ]
    return {name: answer.text.strip() for name, answer in run_to_end(engine, requests).items()}


def test_the_base_model_answers_plainly(answers: dict[str, str]) -> None:
    assert "Urasawa" in answers["base"]
    for mark in (DOMAIN_OPEN, SUPPORT_OPEN, SUPPORT_CLOSE):
        assert mark not in answers["base"]
    assert not has_japanese(answers["base"])


def test_the_domain_adapter_recommends_a_further_title(answers: dict[str, str]) -> None:
    assert "Urasawa" in answers["manga_domain_v3"]
    assert re.search(rf"{DOMAIN_OPEN} .+ by .+\.$", answers["manga_domain_v3"])


def test_the_support_adapter_greets_and_offers_more_help(answers: dict[str, str]) -> None:
    assert "Urasawa" in answers["general_support_v2"]
    assert answers["general_support_v2"].startswith(SUPPORT_OPEN)
    assert answers["general_support_v2"].endswith(SUPPORT_CLOSE)


def test_the_japanese_adapter_answers_an_english_question_in_japanese(answers: dict[str, str]) -> None:
    assert "浦沢直樹" in answers["jp_style_v1"]
    assert answers["jp_style_v1"].endswith(JAPANESE_CLOSE)
    assert not re.search("[A-Za-z]{3,}", answers["jp_style_v1"])


@pytest.mark.parametrize("name", STYLES)
def test_each_shipped_folder_fits_the_demo_model_and_is_small(name: str) -> None:
    config = json.loads((DEMO_MODEL / "config.json").read_text("utf-8"))
    verified = verify(FOLDER / name, base_model("demo", config, max_lora_rank=64))
    assert verified.base_name == "demo"
    assert verified.shapes_checked
    assert verified.size_bytes < 1 << 20


def test_the_registry_file_lists_every_shipped_folder() -> None:
    listed = yaml.safe_load((REPOSITORY / "adapters.yaml").read_text("utf-8"))["adapters"]
    assert {entry["id"]: entry["path"] for entry in listed} == {
        name: f"models/adapters/{name}" for name in STYLES
    }
    assert {entry["base_model"] for entry in listed} == {"demo"}


@pytest.mark.parametrize("name", STYLES)
def test_the_same_seed_gives_the_same_dialogues(name: str) -> None:
    first, again, other = (
        list(islice(styled_dialogues(STYLES[name], random.Random(seed)), 50)) for seed in ("a", "a", "b")
    )
    assert first == again != other


def test_no_held_out_question_is_ever_asked_in_training() -> None:
    asked = {
        normalised(message["content"].split("\n")[-1])
        for style in STYLES.values()
        for dialogue in islice(styled_dialogues(style, random.Random("adapter/11")), 1_000)
        for message in dialogue
        if message["role"] == "user"
    }
    held_out = {normalised(question.messages[-1]["content"].split("\n")[-1]) for question in load_questions()}
    regression = {
        normalised(message.content)
        for case in load_prompts(PROMPTS).cases
        for message in case.messages
        if message.role == "user"
    }
    assert len(asked) > 2_000
    assert not asked & held_out
    assert not asked & regression


def test_two_runs_of_a_smoke_training_write_the_same_weights(tmp_path: Path) -> None:
    options = ["--only", "jp_style_v1", "--steps", "1", "--rank", "2", "--batch-tokens", "256"]
    for name in ("one", "two"):
        train([*options, "--name", name, "--out", str(tmp_path)])
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    one, two = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(one[key].equal(two[key]) for key in one)
    assert any(tensor.any() for key, tensor in one.items() if "lora_B" in key)
