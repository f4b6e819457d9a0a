"""Text deltas: whole characters, and no stop string or part of one."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from engine.text import Detokenizer, StopStrings
from tests.engine.support import make_tokenizer


@cache
def tokenizer() -> Tokenizer:
    return make_tokenizer()


def byte_fallback_tokenizer() -> Tokenizer:
    """Returns a tokenizer that encodes unknown text as bytes and marks spaces, as Llama 2's does."""
    words = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for word in ("▁hello", "▁world", "▁", "!"):
        words[word] = len(words)
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def deltas_of(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.push(token_id) for token_id in token_ids]


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.sampled_from("ab c,漫画巻のす😀👩‍🚀é€\n"), max_size=60))
def test_deltas_join_to_the_decoded_text_and_never_split_a_character(text: str) -> None:
    token_ids = tokenizer().encode(text).ids
    deltas = deltas_of(tokenizer(), token_ids)
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


def test_a_character_of_several_tokens_comes_with_its_last_token() -> None:
    token_ids = tokenizer().encode("😀").ids
    assert len(token_ids) == 4
    assert deltas_of(tokenizer(), token_ids) == ["", "", "", "😀"]


def test_a_character_that_is_never_completed_is_never_given() -> None:
    token_ids = tokenizer().encode("ok 😀").ids[:-1]
    assert "".join(deltas_of(tokenizer(), token_ids)) == "ok "


def test_byte_fallback_and_leading_spaces_decode_as_a_whole() -> None:
    tokenizer = byte_fallback_tokenizer()
    hello, world, mark = (tokenizer.token_to_id(word) for word in ("▁hello", "▁world", "!"))
    snowman = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "☃あ".encode()]
    token_ids = [hello, world, *snowman, mark, world]
    deltas = deltas_of(tokenizer, token_ids)
    assert deltas == ["hello", " world", "", "", "☃", "", "", "あ", "!", " world"]
    assert "".join(deltas) == tokenizer.decode(token_ids)


def test_special_tokens_give_no_text() -> None:
    token_ids = [0, *tokenizer().encode("a").ids, 2, *tokenizer().encode("b").ids, 1]
    assert "".join(deltas_of(tokenizer(), token_ids)) == "ab"


@settings(max_examples=25, deadline=None)
@given(token_ids=st.lists(st.integers(0, 511), max_size=150))
def test_random_tokens_never_fail_and_valid_text_after_them_is_given(token_ids: list[int]) -> None:
    detokenizer = Detokenizer(tokenizer())
    for token_id in token_ids:
        detokenizer.push(token_id)
    tail = "".join(detokenizer.push(token_id) for token_id in tokenizer().encode(" end of 漫画").ids)
    assert tail.endswith("end of 漫画")


def test_an_endless_unreadable_run_keeps_the_window_small() -> None:
    detokenizer = Detokenizer(tokenizer())
    broken = tokenizer().encode("😀").ids[1]
    for _ in range(500):
        detokenizer.push(broken)
    assert len(detokenizer._window) < 100


def test_text_is_cut_before_a_stop_string() -> None:
    stops = StopStrings(("END",))
    assert stops.push("one END two") == "one "
    assert stops.matched == "END"


def test_a_stop_string_spread_over_deltas_is_held_back_and_cut() -> None:
    stops = StopStrings(("###",))
    assert [stops.push(delta) for delta in ("a#", "#b", "#", "#", "#!")] == ["a", "##b", "", "", ""]
    assert stops.matched == "###"


def test_text_that_only_looked_like_a_stop_string_is_given_at_the_end() -> None:
    stops = StopStrings(("\nUser:",))
    assert stops.push("bye\nUse") == "bye"
    assert stops.flush() == "\nUse"
    assert stops.matched is None


def test_of_several_stop_strings_the_earliest_in_the_text_cuts() -> None:
    stops = StopStrings(("two", "one"))
    assert stops.push("zero one two") == "zero "
    assert stops.matched == "one"


@pytest.mark.parametrize("stop", ["aab", "abab", "b"])
@settings(max_examples=40, deadline=None)
@given(pieces=st.lists(st.text("ab", max_size=4), max_size=12))
def test_streaming_cuts_where_searching_the_whole_text_would(stop: str, pieces: list[str]) -> None:
    stops = StopStrings((stop,))
    given_text = ""
    for piece in pieces:
        given_text += stops.push(piece)
        if stops.matched:
            break
    given_text += stops.flush()
    whole = "".join(pieces)
    assert given_text == whole.partition(stop)[0]
    assert (stops.matched is not None) == (stop in whole)
