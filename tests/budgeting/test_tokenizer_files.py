from __future__ import annotations

import json
from pathlib import Path

import pytest

from budgeting.counting import ChatTokenizer
from budgeting.errors import TokenizerError
from budgeting.tokenizer_files import read_tokenizer_files
from tests.budgeting.folders import CHATML, byte_level, write_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = byte_level(["<|im_start|>", "<|im_end|>"])
    return write_folder(tmp_path / "model", tokenizer, CHATML, eos_token="<|im_end|>")


def set_config(folder: Path, **changes: object) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"nowhere: no such folder; needed: .*engine\.model"):
        ChatTokenizer(tmp_path / "nowhere")


def test_a_folder_without_a_tokenizer_says_what_is_needed(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is missing; needed"):
        ChatTokenizer(folder)


@pytest.mark.parametrize("broken", ["", "{", "{}", '{"version": "1.0"', "\x00\x01"])
def test_a_broken_tokenizer_is_one_clear_error(folder: Path, broken: str) -> None:
    (folder / "tokenizer.json").write_text(broken)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be used"):
        ChatTokenizer(folder)


def test_bytes_that_are_no_text_are_one_clear_error(folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        ChatTokenizer(folder)


@pytest.mark.parametrize("broken", ["[1]", "{"])
def test_a_broken_config_is_one_clear_error(folder: Path, broken: str) -> None:
    (folder / "tokenizer_config.json").write_text(broken)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        ChatTokenizer(folder)


def test_a_folder_without_a_template_says_where_it_was_sought(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(TokenizerError, match=r"needed: chat_template\.jinja, or chat_template in"):
        ChatTokenizer(folder)


@pytest.mark.parametrize(
    "given", ["T", [{"name": "tools", "template": "no"}, {"name": "default", "template": "T"}]]
)
def test_the_template_may_stand_in_the_config(folder: Path, given: object) -> None:
    (folder / "chat_template.jinja").unlink()
    set_config(folder, chat_template=given)
    assert read_tokenizer_files(folder).template == "T"


def test_the_templates_file_wins_over_the_config(folder: Path) -> None:
    set_config(folder, chat_template="T")
    assert read_tokenizer_files(folder).template == CHATML


def test_special_tokens_are_read_in_both_spellings_and_the_config_wins(folder: Path) -> None:
    (folder / "special_tokens_map.json").write_text('{"eos_token": "x", "pad_token": {"content": "in"}}')
    set_config(folder, add_bos_token=False, bos_token=None)
    assert read_tokenizer_files(folder).specials == {"eos_token": "<|im_end|>", "pad_token": "in"}


def test_a_special_token_that_the_tokenizer_lacks_is_named(folder: Path) -> None:
    set_config(folder, bos_token="<bos>")
    with pytest.raises(TokenizerError, match="bos_token is '<bos>'"):
        ChatTokenizer(folder)


def test_a_tokenizer_that_truncates_or_pads_is_told_not_to(folder: Path) -> None:
    data = json.loads((folder / "tokenizer.json").read_text())
    data["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = ChatTokenizer(folder)
    assert (
        tokenizer.decode(tokenizer.encode("in the story of Vinland Saga")) == "in the story of Vinland Saga"
    )
