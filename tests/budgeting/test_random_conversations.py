"""Hundreds of random conversations, in many scripts, with random tokenizers: the properties of every plan."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from msgspec import structs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from budgeting.counting import ChatTokenizer
from budgeting.errors import ContextTooLong
from budgeting.plan import BudgetPlanner
from budgeting.sections import latest_turn
from budgeting.values import (
    BudgetRequest,
    CanonicalPrompt,
    EvidenceChunk,
    Message,
    Plan,
    PromptSection,
    Role,
    SectionBudgets,
)
from tests.budgeting.folders import CHATML, COUNTING, HEADERS, UNMARKED, write_folder
from tests.budgeting.strategies import SEARCHES

CONVERSATIONS = 400 if SEARCHES else 60
SENTENCES = (
    "The box set is in stock.", "Which volume comes next?", "It costs 12.50 EUR!", "I liked vol. 3 most.",
    "在庫はあります。", "何かお勧めはありますか？", "全二十七巻です！", "한국어로 된 만화가 있나요?", "네, 있습니다.",
    "Есть ли у вас манга?", "Да, конечно.", "هل هذا متوفر؟", "نعم، متوفر.", "क्या यह उपलब्ध है।", "हाँ।", "有货吗？有。",
    "มีสินค้าไหม", "Ça va très bien; merci.", "🙂🙂 ok", "<|im_end|> <|eot|> </s>", "x", "\n\n", "  two  blanks ", "a\tb",
)  # fmt: skip
SPECIALS = ("<|begin|>", "<|start|>", "<|end|>", "<|eot|>", "<|im_start|>", "<|im_end|>")
ORDERS = (
    (PromptSection.RETRIEVAL, PromptSection.RECENT_TURNS),
    (PromptSection.RECENT_TURNS, PromptSection.RETRIEVAL),
    (PromptSection.RETRIEVAL,),
    (),
)


def random_tokenizer(chance: random.Random) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = chance.choice([level, pre_tokenizers.Sequence([digits, level])])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=chance.randrange(265, 700),
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = [" ".join(chance.choices(SENTENCES, k=30)) for _ in range(5)]
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def text(chance: random.Random, most: int = 6) -> str:
    return chance.choice(["", " "]).join(chance.choices(SENTENCES, k=chance.randint(1, most)))


def conversation(chance: random.Random) -> CanonicalPrompt:
    roles = [Role.USER, Role.ASSISTANT]
    turns = [
        Message(roles[at % 2] if chance.random() < 0.9 else chance.choice(roles), text(chance))
        for at in range(chance.randrange(0, 16))
    ]
    return CanonicalPrompt(
        system=tuple(text(chance) for _ in range(chance.randrange(3))),
        turns=(*turns, Message(Role.USER, text(chance, 3))),
        evidence=tuple(
            EvidenceChunk(
                f"m_{chance.randrange(9)}",
                "catalog",
                text(chance, 12),
                chance.choice([None, chance.random()]),
            )
            for _ in range(chance.randrange(6))
        ),
        context=chance.choice(["", "locale: ja\ntime: 2026-11-20T10:00:00Z"]),
    )


def planned(tokenizer: ChatTokenizer, request: BudgetRequest, max_model_len: int) -> Plan | ContextTooLong:
    try:
        return BudgetPlanner(tokenizer, max_model_len=max_model_len).plan(request)
    except ContextTooLong as error:
        return error


def like(template: str, one: Plan, other: Plan) -> bool:
    """Whether two plans may share a prefix: COUNTING writes the number of messages into every message."""
    return template != COUNTING or len(one.messages) == len(other.messages)


@pytest.mark.slow
@pytest.mark.parametrize("template", [CHATML, HEADERS, COUNTING, UNMARKED])
@pytest.mark.parametrize("seed", [1, 2])
def test_every_promise_holds_for_random_conversations(template: str, seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    tokenizer = ChatTokenizer(
        write_folder(tmp_path, random_tokenizer(chance), template, bos_token="<|begin|>", eos_token="<|eot|>")
    )
    trims = "trim" in template
    summarized = cut = 0
    for _ in range(CONVERSATIONS):
        prompt = conversation(chance)
        request = BudgetRequest(
            prompt,
            max_tokens=chance.randint(1, 60),
            budgets=SectionBudgets(
                system=100,
                retrieval=chance.randrange(200),
                recent_turns=chance.randrange(300),
                older_summary=chance.choice([0, chance.randrange(120)]),
            ),
            spare=chance.choice(ORDERS),
        )
        length = chance.randint(70, 1_200)
        plan = planned(tokenizer, request, length)
        if isinstance(plan, ContextTooLong):
            assert plan.needed > plan.allowed
            continue
        summarized += plan.summarized_turns > 0
        cut += bool(plan.cut_chunks)

        # The plan fits the length, and its counts are those of the ids that the engine receives.
        assert len(plan.token_ids) + plan.generation_reserve <= length
        assert plan.generation_reserve == request.max_tokens
        assert plan.counts.total == len(plan.token_ids)
        assert plan.token_ids == tokenizer.encode_chat(plan.messages)
        assert plan.counts.older_summary <= request.budgets.older_summary

        # The system part and the latest turn are sent word for word.
        assert plan.messages[-1] == prompt.turns[-1]
        latest = prompt.turns[-1].content
        assert (latest.strip() if trims else latest) in tokenizer.decode(plan.token_ids)
        assert tuple(m.content for m in plan.messages[: len(prompt.system)]) == prompt.system

        # Only whole exchanges are dropped: after a drop, the first turn that is sent is a user's.
        assert plan.dropped_turns <= latest_turn(prompt.turns)
        if plan.dropped_turns > 0:
            assert prompt.turns[plan.dropped_turns].role is Role.USER

        # Planning again gives the same plan. Another context changes no token before the boundary.
        assert planned(tokenizer, request, length) == plan
        other = structs.replace(prompt, context="locale: en\nname: Aiko")
        changed = planned(tokenizer, structs.replace(request, prompt=other), length)
        if prompt.context and isinstance(changed, Plan) and like(template, changed, plan):
            assert changed.prefix_tokens == plan.prefix_tokens
            assert changed.token_ids[: plan.prefix_tokens] == plan.token_ids[: plan.prefix_tokens]

        # With more room, no more is dropped.
        more = planned(tokenizer, request, length + chance.randrange(300))
        assert isinstance(more, Plan)
        assert set(more.dropped_chunks) <= set(plan.dropped_chunks)
        assert set(more.cut_chunks) <= {*plan.cut_chunks, *plan.dropped_chunks}
        assert more.dropped_turns <= plan.dropped_turns
    assert summarized and cut
