from __future__ import annotations

from pathlib import Path

import pytest

from budgeting.counting import ChatTokenizer
from budgeting.plan import BudgetPlanner
from budgeting.template import GENERATES
from budgeting.values import BudgetRequest, Message, Role
from gateway.config.errors import ConfigError
from gateway.prompts.canonical import Canonicalizer
from gateway.prompts.text import ModelText, sampling_defaults

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
    return ChatTokenizer(DEMO)


@pytest.fixture
def text(tokenizer: ChatTokenizer) -> ModelText:
    return ModelText(tokenizer, 4096, Canonicalizer())


async def test_tokenizing_messages_counts_what_a_request_of_them_would_use(
    text: ModelText, tokenizer: ChatTokenizer
) -> None:
    plan = BudgetPlanner(tokenizer, max_model_len=4096).plan(
        BudgetRequest(Canonicalizer().messages(SHUFFLED).prompt)
    )
    assert text.encode_chat(SHUFFLED) == plan.token_ids
    assert (text.tokenizer.decode(plan.token_ids)).startswith("<|im_start|>system\nBe kind.<|im_end|>\n")
    assert text.max_model_len == 4096


async def test_the_generation_prompt_may_be_left_out(text: ModelText) -> None:
    ids = text.encode_chat(SHUFFLED, kwargs={GENERATES: False})
    assert text.tokenizer.decode(ids) + "<|im_start|>assistant\n" == text.tokenizer.decode(
        text.encode_chat(SHUFFLED)
    )


@pytest.mark.parametrize("words", [3, 3_000])
async def test_texts_of_any_size_come_back(text: ModelText, words: int) -> None:
    written = "在庫 in stock 🙂 " * words
    ids = text.tokenizer.encode(written)
    assert text.tokenizer.decode(ids) == written
    assert len(text.tokenizer.tokens(ids)) == len(ids)
    long_talk = text.encode_chat([Message(Role.USER, written)])
    assert written in text.tokenizer.decode(long_talk)


async def test_ids_outside_the_vocabulary_are_refused(text: ModelText) -> None:
    for ids in ([-1], [10**6] * 3_000):
        with pytest.raises(ValueError, match="not in the vocabulary"):
            text.tokenizer.decode(ids)


def test_a_checkpoints_top_k_may_be_written_with_a_point(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_k": 20.0, "temperature": 1, "eos_token_id": 2}')
    defaults = sampling_defaults(tmp_path)
    assert (type(defaults.top_k), defaults.top_k, defaults.temperature) == (int, 20, 1.0)


@pytest.mark.parametrize("text", ['{"top_k": 20.5}', '{"temperature": [1]}', "[]", "{"])
def test_other_sampling_defaults_stop_the_start_with_their_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        sampling_defaults(tmp_path)
