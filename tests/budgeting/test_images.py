"""Images take tokens of the prompt, by the model's formula."""

from __future__ import annotations

import pytest

from budgeting.counting import ChatTokenizer
from budgeting.errors import ContextTooLong
from budgeting.images import ImageCost, ImageRounding
from budgeting.plan import BudgetPlanner
from budgeting.values import (
    BudgetRequest,
    CanonicalPrompt,
    ImageContent,
    Message,
    Role,
    SectionBudgets,
)

QWEN2 = ImageCost()
QWEN3 = ImageCost(unit=32, min_pixels=65_536, max_pixels=16_777_216)
PIXTRAL = ImageCost(
    unit=16, base_tokens=0, row_tokens=1, min_pixels=1, max_edge=1024, rounding=ImageRounding.UP
)
GPT_4O = ImageCost(
    unit=512,
    unit_tokens=170,
    base_tokens=85,
    min_pixels=1,
    max_edge=2048,
    max_short_edge=768,
    rounding=ImageRounding.UP,
)
SMOLVLM = ImageCost(
    unit=512,
    unit_tokens=66,
    row_tokens=1,
    base_tokens=68,
    min_pixels=1,
    min_edge=2048,
    max_edge=2048,
    rounding=ImageRounding.UP_FROM_WHOLE_PIXELS,
)
LLAVA = ImageCost(unit_tokens=0, base_tokens=576)


@pytest.mark.parametrize(
    ("cost", "size", "tokens"),
    [
        (QWEN2, (1120, 560), 40 * 20 + 2),
        (QWEN2, (28, 28), 2 * 2 + 2),
        (QWEN2, (10_000, 10_000), 127 * 127 + 2),
        (PIXTRAL, (1024, 1024), 64 * 65),
        (PIXTRAL, (4096, 2048), 32 * 65),
        (PIXTRAL, (17, 16), 3),
        # The two examples of OpenAI's documentation.
        (GPT_4O, (1024, 1024), 765),
        (GPT_4O, (2048, 4096), 1105),
        (SMOLVLM, (640, 480), 3 * (4 * 66 + 1) + 68),
        # Values of the processors of transformers 5: narrow images, and images at a boundary of two sizes.
        (QWEN2, (1000, 41), 36 * 1 + 2),
        (QWEN2, (1000, 43), 36 * 2 + 2),
        (QWEN2, (5, 900), 27 * 1 + 2),
        (QWEN2, (9999, 4321), 194 * 84 + 2),
        (QWEN2, (30, 42), 2 * 3 + 2),
        (QWEN3, (300, 40), 22 * 3 + 2),
        (QWEN3, (8000, 8000), 128 * 128 + 2),
        (SMOLVLM, (1600, 801), 3 * (4 * 66 + 1) + 68),
        (SMOLVLM, (9999, 5001), 2 * (4 * 66 + 1) + 68),
        (SMOLVLM, (5001, 9999), 4 * (2 * 66 + 1) + 68),
        (SMOLVLM, (2000, 10), 1 * (4 * 66 + 1) + 68),
        (LLAVA, (3000, 20), 576),
    ],
)
def test_an_image_costs_what_the_models_formula_says(
    cost: ImageCost, size: tuple[int, int], tokens: int
) -> None:
    assert cost.tokens(*size) == tokens


def image(name: str, side: int = 280) -> ImageContent:
    return ImageContent(width=side, height=side, sha256=name)


def shown(text: str, *images: ImageContent) -> Message:
    return Message(Role.USER, text, parts=(text, *images))


def test_the_plan_counts_images_besides_the_token_ids(tokenizer: ChatTokenizer) -> None:
    planner = BudgetPlanner(tokenizer, max_model_len=1000)
    turns = (shown("one", image("a"), image("b")), Message(Role.ASSISTANT, "so"), shown("two", image("a")))
    plain = planner.plan(BudgetRequest(CanonicalPrompt(turns=tuple([one.without_parts for one in turns]))))
    plan = planner.plan(BudgetRequest(CanonicalPrompt(turns=turns)))
    assert plan.image_tokens == 3 * 102
    assert plan.token_ids == plain.token_ids
    assert plan.counts.total == len(plan.token_ids) + 3 * 102
    assert plan.counts.recent_turns == plain.counts.recent_turns + 3 * 102
    assert plan.counts.total + plan.generation_reserve == 1000
    assert [one.parts for one in plan.messages] == [one.parts for one in turns]


def test_images_that_do_not_fit_are_too_long(tokenizer: ChatTokenizer) -> None:
    planner = BudgetPlanner(tokenizer, max_model_len=300)
    prompt = CanonicalPrompt(turns=(shown("one", *[image("a")] * 3),))
    with pytest.raises(ContextTooLong) as refused:
        planner.plan(BudgetRequest(prompt, budgets=SectionBudgets()))
    assert refused.value.needed > 300


def test_old_turns_are_cut_by_the_tokens_of_their_images(tokenizer: ChatTokenizer) -> None:
    planner = BudgetPlanner(tokenizer, max_model_len=420)
    turns = (
        shown("one", image("a")),
        Message(Role.ASSISTANT, "so"),
        shown("two", image("b")),
        Message(Role.ASSISTANT, "so"),
        shown("three", image("c")),
    )
    budgets = SectionBudgets(older_summary=0)
    plan = planner.plan(BudgetRequest(CanonicalPrompt(turns=turns), max_tokens=100, budgets=budgets))
    assert plan.dropped_turns == 2
    assert [one.sha256 for message in plan.messages for one in message.images] == ["b", "c"]
    assert plan.image_tokens == 2 * 102
    assert plan.counts.total <= 320


def test_images_take_no_space_in_the_tokenizers_cache(tokenizer: ChatTokenizer) -> None:
    planner = BudgetPlanner(tokenizer, max_model_len=1000)
    sizes = set()
    for number in range(3):
        planner.plan(BudgetRequest(CanonicalPrompt(turns=(shown("the same", image(f"{number}")),))))
        sizes.add(tokenizer.cache_bytes)
    assert len(sizes) == 1
