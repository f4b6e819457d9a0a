"""Random conversations in several scripts."""

from __future__ import annotations

import os
import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from budgeting.values import CanonicalPrompt, EvidenceChunk, Message, Role, SectionBudgets

# Without new examples, nearly the same ones are tried in every run: a third of them finds a regression.
SEARCHES = "SLUICE_TEST_RANDOM" in os.environ


def examples(number: int) -> settings:
    """Settings with `number` examples if new ones are tried, else a third; a slow machine is no failure."""
    return settings(
        max_examples=number if SEARCHES else number // 3,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


WORDS = (
    "manga",
    "in",
    "the",
    "story",
    "Vinland",
    "Saga",
    "何か",
    "お勧め",
    "있나요",
    "что",
    "🙂",
    "é",
    "10",
    "don't",
)
CONTROLS = ("<|im_end|>", "<|im_start|>system\n", "<|eot|>", "<|start|>", "<s>", "</s>", "<|begin|>")

# A phrase is one choice, not a dozen: drawing a conversation word by word takes longer than planning it.
_chance = random.Random(1)
_PHRASES = ("", *WORDS, *(" ".join(_chance.choices(WORDS, k=_chance.randint(2, 12))) for _ in range(500)))
_words = (
    st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join) if SEARCHES else st.sampled_from(_PHRASES)
)
_any = st.text(st.characters(codec="utf-8"), max_size=12)
_blanks = st.sampled_from(["", " ", "\n", "\n\n", "  \n", "\t"])

texts = st.builds(lambda a, b, c, d: a + b + c + d, _blanks, _words, _any, _blanks)
hostile_texts = st.builds(
    lambda parts: "".join(parts), st.lists(st.sampled_from(CONTROLS) | texts, min_size=1, max_size=4)
)
roles = st.sampled_from([Role.SYSTEM, Role.USER, Role.ASSISTANT])
messages = st.builds(Message, roles, texts)
hostile_messages = st.builds(Message, roles, hostile_texts)

chunks = st.builds(
    EvidenceChunk,
    chunk_id=st.integers(0, 9).map(lambda n: f"m_{n}"),
    source_type=st.sampled_from(["catalog", "review"]),
    text=texts,
    score=st.none() | st.floats(0, 1, allow_nan=False),
)


@st.composite
def prompts(draw: st.DrawFn) -> CanonicalPrompt:
    turns = draw(
        st.lists(st.builds(Message, st.sampled_from([Role.USER, Role.ASSISTANT]), texts), max_size=12)
    )
    return CanonicalPrompt(
        system=tuple(draw(st.lists(texts.filter(bool), max_size=3))),
        turns=(*turns, Message(Role.USER, draw(texts))),
        evidence=tuple(draw(st.lists(chunks, max_size=6))),
        context=draw(st.sampled_from(["", "locale: ja", "locale: ja\ntime: 2026-11-20T10:00:00Z"])),
    )


budgets = st.builds(
    SectionBudgets,
    system=st.integers(0, 100),
    retrieval=st.integers(0, 200),
    recent_turns=st.integers(0, 200),
    older_summary=st.integers(0, 100),
)
