from __future__ import annotations

import json
from pathlib import Path

import pytest

from budgeting.byte_bpe import TokenBytes
from budgeting.counting import ChatTokenizer
from tests.budgeting.folders import write_all

TEXT = "Vinland Saga, volume 1: 何か 😀 the\tmanga\n~"


@pytest.mark.parametrize("kind", ["chatml", "headers"])
def test_the_bytes_of_a_texts_tokens_joined_are_the_text(tmp_path: Path, kind: str) -> None:
    tokenizer = ChatTokenizer(write_all(tmp_path)[kind])
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids).decode() == TEXT
    assert any(len(tokenizer.token_bytes(token_id)) == 1 for token_id in ids)


def test_every_byte_has_a_token_in_a_byte_level_vocabulary(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(write_all(tmp_path)["chatml"])
    assert {tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocabulary)} >= {
        bytes([byte]) for byte in range(256)
    }


def test_a_control_token_shows_as_it_is_written(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(write_all(tmp_path)["chatml"])
    [end] = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    assert tokenizer.token_bytes(end) == b"<|im_end|>"


def test_an_id_that_the_vocabulary_does_not_have_stands_for_nothing(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(write_all(tmp_path)["chatml"])
    assert tokenizer.token_bytes(10**6) == b""


def test_other_vocabularies_mark_blanks_and_spell_single_bytes(tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(write_all(tmp_path)["metaspace"])
    ids = tokenizer.encode("in the manga", add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == b" in the manga"
    pieces = TokenBytes(json.dumps({"decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}}))
    assert [pieces.of(token) for token in ("<0xE3>", "▁the", "<0xG3>")] == [b"\xe3", b" the", b"<0xG3>"]
