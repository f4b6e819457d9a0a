from __future__ import annotations

from pathlib import Path

import pytest

from budgeting.counting import ChatTokenizer
from budgeting.values import BudgetRequest, CanonicalPrompt, Message, Role, SectionBudgets, SummaryKind
from gateway.prompts.canonical import Canonicalizer
from gateway.prompts.engine_summary import EngineSummarizer
from gateway.prompts.text import ModelText
from gateway.prompts.versions import PromptVersions
from gateway.wiring.model import make_engine_summarizer
from tests.scripted import ScriptedBackend

DEMO = Path(__file__).parents[2] / "models" / "demo"
BACKENDS = {"local": ScriptedBackend("local"), "far": ScriptedBackend("far")}


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(DEMO)


def made(
    tokenizer: ChatTokenizer, folder: Path, summarizer: str, on_engine: list[str]
) -> tuple[EngineSummarizer | None, ModelText]:
    (folder / "v.yaml").write_text(f"id: v\nsystem: S\nsummarizer: {summarizer}\n")
    text = ModelText(tokenizer, 700, Canonicalizer())
    found = make_engine_summarizer(
        text,
        versions=PromptVersions.from_folder(folder),
        backend=BACKENDS[min(on_engine)] if on_engine else None,
        new_id=lambda prefix: prefix,
    )
    return found, text


def ask(text: ModelText) -> int:
    """Plans a conversation that is too long; returns how many turns were summarized."""
    turns = [Message(Role.USER, f"Order {n} is told of here, at some length. " * 4) for n in range(20)]
    request = BudgetRequest(
        CanonicalPrompt(turns=tuple(turns)),
        max_tokens=50,
        budgets=SectionBudgets(recent_turns=200),
        summary=SummaryKind.ENGINE,
    )
    return text.planner.plan(request).summarized_turns


def test_a_prompt_version_that_asks_for_it_gets_summaries_by_the_embedded_engine(
    tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    summarizer, text = made(tokenizer, tmp_path, "engine", ["local"])
    assert summarizer is not None
    assert ask(text) > 0
    assert len(summarizer.waiting) == 1
    text.limit(600)  # the engine's pool turned out smaller
    assert ask(text) > 0
    assert len(summarizer.waiting) == 2


@pytest.mark.parametrize(("kind", "on_engine"), [("extractive", ["local"]), ("engine", [])])
def test_otherwise_the_summary_is_made_of_picked_sentences(
    tokenizer: ChatTokenizer, tmp_path: Path, kind: str, on_engine: list[str]
) -> None:
    summarizer, text = made(tokenizer, tmp_path, kind, on_engine)
    assert summarizer is None
    assert ask(text) > 0


def test_a_model_text_reports_which_library_counts_tokens(tokenizer: ChatTokenizer) -> None:
    assert ModelText(tokenizer, 700, Canonicalizer()).tokenizer.encoder == "tiktoken"
