"""The demo model's tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from models.batches import encode_dialogue
from models.tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, VOCAB_SIZE, save_tokenizer, train_tokenizer

DEMO = Path(__file__).parents[2] / "models" / "demo"
TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))

texts = st.text(max_size=60).filter(lambda text: not any(token in text for token in SPECIAL_TOKENS))
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(("system", "user", "assistant")), "content": texts}),
    min_size=1,
    max_size=5,
)


# As a service without transformers makes it.
TEMPLATE = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(CHAT_TEMPLATE)


def render(conversation: list[dict[str, str]], prompt: bool = False) -> str:
    return TEMPLATE.render(messages=conversation, add_generation_prompt=prompt)


@pytest.fixture(scope="module")
def loaded() -> Any:
    return AutoTokenizer.from_pretrained(DEMO)


@given(texts)
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens_are_single_ids_at_the_start_of_the_vocabulary() -> None:
    assert [TOKENIZER.encode(token).ids for token in SPECIAL_TOKENS] == [[0], [1], [2]]


def test_the_vocabulary_has_the_size_the_model_expects() -> None:
    assert TOKENIZER.get_vocab_size() == VOCAB_SIZE


def test_digits_are_separate_tokens() -> None:
    assert len(TOKENIZER.encode("9876").ids) == 4


def test_the_loaded_tokenizer_encodes_like_the_plain_one(loaded: Any) -> None:
    for text in (
        "Do you have  Berserk?",
        "こんにちは、在庫は？",
        "<|im_start|>user\nhi<|im_end|>\n",
        "🎉 9.99",
    ):
        assert loaded(text, add_special_tokens=False).input_ids == TOKENIZER.encode(text).ids
        assert loaded(text).input_ids == TOKENIZER.encode(text).ids


def test_the_end_of_a_message_ends_generation(loaded: Any) -> None:
    assert loaded.eos_token == "<|im_end|>"
    assert loaded.eos_token_id == 2
    assert loaded.pad_token_id == 0


@given(messages)
def test_a_longer_conversation_extends_the_text_of_a_shorter_one(conversation: list[dict[str, str]]) -> None:
    assert render(conversation) == "".join(render([message]) for message in conversation)
    assert render(conversation, prompt=True) == render(conversation) + "<|im_start|>assistant\n"


@given(messages)
def test_tokens_of_a_conversation_are_the_tokens_of_its_messages(conversation: list[dict[str, str]]) -> None:
    whole = TOKENIZER.encode(render(conversation)).ids
    assert whole == [token for message in conversation for token in TOKENIZER.encode(render([message])).ids]


def test_transformers_renders_the_same_text(loaded: Any) -> None:
    conversation = [
        {"role": "system", "content": "You are a manga shopping assistant."},
        {"role": "system", "content": "Current time: 10:22."},
        {"role": "user", "content": "Hi {x}\n\nthere "},
        {"role": "assistant", "content": "こんにちは"},
        {"role": "user", "content": "<b>ok</b>"},
    ]
    text = loaded.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert text == render(conversation, prompt=True)


def test_the_template_file_and_the_tokenizer_config_agree(loaded: Any) -> None:
    assert (DEMO / "chat_template.jinja").read_text(encoding="utf-8") == CHAT_TEMPLATE
    assert loaded.chat_template == CHAT_TEMPLATE


def test_training_encodes_dialogues_as_the_template_renders_them() -> None:
    dialogue = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who wrote Monster?"},
        {"role": "assistant", "content": "Monster is by Naoki Urasawa."},
    ]
    ids, produced = encode_dialogue(
        TOKENIZER, [{"role": m["role"], "content": m["content"]} for m in dialogue]
    )
    assert ids == TOKENIZER.encode(render(dialogue)).ids
    answer = [token for token, wanted in zip(ids, produced, strict=True) if wanted]
    assert TOKENIZER.decode(answer, skip_special_tokens=False) == "Monster is by Naoki Urasawa.<|im_end|>"


def test_a_tokenizer_trained_on_little_text_still_covers_every_byte(tmp_path: Path) -> None:
    small = train_tokenizer(["hello manga", "hello shop"])
    save_tokenizer(small, tmp_path)
    again = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert again.decode(again.encode("Żółć 漫画 🎌").ids) == "Żółć 漫画 🎌"
