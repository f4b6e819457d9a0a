"""The shipped folder models/demo: size, format, and whether it answers sensibly."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from evaluation.demo_eval import DemoQuestion, answer_all, load_model, load_questions, summary
from models.invent import invented_series
from models.prompts import catalogue_line

DEMO = Path(__file__).parents[2] / "models" / "demo"


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any]:
    torch.set_num_threads(1)
    return load_model(DEMO)


def ask(demo: tuple[Any, Any], *contents: str, system: str | None = None) -> str:
    """Return the greedy answer to a conversation of alternating user and assistant messages."""
    conversation = [{"role": "system", "content": system}] if system else []
    for number, content in enumerate(contents):
        conversation.append({"role": "assistant" if number % 2 else "user", "content": content})
    question = DemoQuestion(id="q", topic="t", language="en", expect=".", messages=conversation)
    return answer_all(*demo, [question])[0].answer


def test_the_folder_takes_at_most_twelve_megabytes() -> None:
    assert sum(path.stat().st_size for path in DEMO.iterdir()) <= 12_000_000


def test_the_folder_holds_no_left_over_temporary_file() -> None:
    assert {path.name for path in DEMO.iterdir()} == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_weights_are_bf16_under_the_standard_llama_names_with_tied_embeddings() -> None:
    with safe_open(DEMO / "model.safetensors", framework="pt") as weights:
        names = set(weights.keys())
        assert {weights.get_tensor(name).dtype for name in names} == {torch.bfloat16}
    assert "model.embed_tokens.weight" in names
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert "lm_head.weight" not in names


def test_the_config_names_a_standard_llama_with_64_wide_heads() -> None:
    config = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["head_dim"] == 64
    assert config["num_attention_heads"] == 2 * config["num_key_value_heads"]
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert config["max_position_embeddings"] == 4096
    assert config["tie_word_embeddings"] is True


def test_the_model_names_an_author_without_any_system_message(demo: tuple[Any, Any]) -> None:
    assert "Urasawa" in ask(demo, "Who wrote Monster?")


def test_the_model_states_delivery_times(demo: tuple[Any, Any]) -> None:
    assert "business days" in ask(
        demo, "How long does delivery take?", system="You are a manga shopping assistant."
    )


def test_the_model_answers_a_japanese_question_in_japanese(demo: tuple[Any, Any]) -> None:
    assert "在庫" in ask(demo, "ベルセルクの在庫はありますか？")


def test_the_model_follows_up_on_the_series_of_the_turn_before(demo: tuple[Any, Any]) -> None:
    answer = ask(demo, "Who wrote Pluto?", "Pluto is by Naoki Urasawa.", "How many volumes does it have?")
    assert "8" in answer


def test_the_model_reads_most_counts_of_unknown_series_off_a_catalogue_line(demo: tuple[Any, Any]) -> None:
    rng = random.Random(4242)
    questions = []
    for number in range(20):
        series = invented_series(rng)
        system = f"You are a manga shopping assistant.\n{catalogue_line(series, rng)}"
        conversation = [
            {"role": "system", "content": system},
            {"role": "user", "content": f"How many volumes does {series.title} have?"},
        ]
        questions.append(
            DemoQuestion(f"q{number}", "t", "en", rf"(?<!\d){series.volumes} volumes", conversation)
        )
    assert summary(answer_all(*demo, questions))["passed"] >= 14


def test_the_model_declines_what_has_nothing_to_do_with_the_shop(demo: tuple[Any, Any]) -> None:
    assert "manga" in ask(demo, "What is the weather tomorrow?")


@pytest.fixture(scope="module")
def report(demo: tuple[Any, Any]) -> dict[str, Any]:
    """The counts of the held-out evaluation, computed once."""
    return summary(answer_all(*demo, load_questions()))


def test_no_fewer_held_out_questions_pass_than_when_the_weights_were_made(report: dict[str, Any]) -> None:
    # Two below the 65 on record: arithmetic differs a little between processors.
    assert report["asked"] == 100
    assert report["passed"] >= 63, report


def test_answers_end_by_themselves_and_differ_from_each_other(report: dict[str, Any]) -> None:
    assert report["ended"] >= 95, report
    assert report["distinct_answers"] >= 60, report
