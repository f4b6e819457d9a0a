from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from budgeting.counting import ChatTokenizer
from budgeting.plan import BudgetPlanner
from budgeting.values import BudgetRequest, Message, Role
from gateway.prompts.canonical import canonicalize
from gateway.prompts.text import TextService, TokenizerText

DEMO = Path(__file__).parents[2] / "models" / "demo"
SHUFFLED = [
    Message(Role.USER, "hi"),
    Message(Role.SYSTEM, "Be kind. \r\n"),
    Message(Role.ASSISTANT, "hello "),
    Message(Role.SYSTEM, ""),
    Message(Role.USER, "bye"),
]


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.from_folder(DEMO)


@pytest.fixture
def text(tokenizer: ChatTokenizer) -> TextService:
    return TokenizerText(tokenizer, max_model_len=4096)


async def test_tokenizing_messages_counts_what_a_request_of_them_would_use(
    text: TextService, tokenizer: ChatTokenizer
) -> None:
    plan = BudgetPlanner(tokenizer, max_model_len=4096).plan(BudgetRequest(canonicalize(SHUFFLED).prompt))
    assert await text.encode_chat(SHUFFLED) == plan.token_ids
    assert (await text.decode(plan.token_ids)).startswith("<|im_start|>system\nBe kind.<|im_end|>\n")
    assert text.max_model_len == 4096


async def test_the_generation_prompt_may_be_left_out(text: TextService) -> None:
    ids = await text.encode_chat(SHUFFLED, add_generation_prompt=False)
    assert await text.decode(ids) + "<|im_start|>assistant\n" == await text.decode(
        await text.encode_chat(SHUFFLED)
    )


@pytest.mark.parametrize("words", [3, 3_000])
async def test_texts_of_any_size_come_back(text: TextService, words: int) -> None:
    written = "在庫 in stock 🙂 " * words
    ids = await text.encode(written)
    assert await text.decode(ids) == written
    assert len(text.tokens(ids)) == len(ids)
    long_talk = await text.encode_chat([Message(Role.USER, written)])
    assert written in await text.decode(long_talk)


async def test_ids_outside_the_vocabulary_are_refused(text: TextService) -> None:
    for ids in ([-1], [10**6] * 3_000):
        with pytest.raises(ValueError, match="not in the vocabulary"):
            await text.decode(ids)


@pytest.mark.serial
async def test_a_large_text_does_not_hold_up_the_event_loop(text: TextService) -> None:
    beats = 0
    done = False

    async def beat() -> None:
        nonlocal beats
        while not done:
            await asyncio.sleep(0.001)
            beats += 1

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(beat())
        written = "The art of Vinland Saga is in stock. " * 10_000
        await text.encode(written)
        done = True
    assert beats >= 10, "held up, the loop would stand still for as long as the encoding takes"
