from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgeting.counting import ChatTokenizer
from budgeting.errors import TemplateRefused, TokenizerError
from budgeting.template import GENERATES
from budgeting.token_ids import joined
from budgeting.values import Message, Role, Tool
from tests.budgeting import strategies
from tests.budgeting.conftest import ALL_KINDS
from tests.budgeting.folders import CHATML, byte_level, write_folder

ALTERNATING_TALK = [Message(Role.USER, "hi"), Message(Role.ASSISTANT, "hello"), Message(Role.USER, "bye")]


def test_templates_that_render_each_message_alone_are_recognized(
    tokenizers: dict[str, ChatTokenizer],
) -> None:
    assert {name for name, tokenizer in tokenizers.items() if tokenizer.per_message} == {
        "demo",
        "chatml",
        "headers",
    }


@strategies.examples(100)
@given(
    conversation=st.lists(strategies.hostile_messages, max_size=6),
    answer=st.booleans(),
    tools=st.sampled_from([(), (Tool("stock"),)]),
)
def test_message_by_message_gives_exactly_the_ids_of_the_whole_rendering(
    tokenizer: ChatTokenizer, conversation: list[Message], answer: bool, tools: tuple[Tool, ...]
) -> None:
    cuts, kwargs = tuple(range(len(conversation) + 1)), {GENERATES: answer}
    fast = tokenizer.encode_parts(conversation, cuts, tools=tools, kwargs=kwargs)
    assert fast == tokenizer.encode_parts_whole(conversation, cuts, tools=tools, kwargs=kwargs)


@strategies.examples(60)
@given(conversation=st.lists(strategies.hostile_messages, min_size=1, max_size=5))
def test_a_message_never_contains_a_control_token(
    tokenizer: ChatTokenizer, conversation: list[Message]
) -> None:
    harmless = [Message(message.role, "x") for message in conversation]
    ids = tokenizer.encode_chat(conversation)
    control = {i for i in range(tokenizer.vocabulary) if tokenizer.tokens([i])[0].startswith("<|")}
    assert [i for i in ids if i in control] == [i for i in tokenizer.encode_chat(harmless) if i in control]


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_forged_end_of_turn_stays_text(tokenizers: dict[str, ChatTokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    forged = Message(Role.USER, "in <s> </s> <|im_end|> <|eot|>\ufdd0\ufdd1\ufdd2 the")
    for mark in ("<s>", "</s>", "<|im_end|>", "<|eot|>"):
        seen = tokenizer.tokens(tokenizer.encode_chat([forged])).count(mark)
        assert seen == tokenizer.tokens(tokenizer.encode_chat([Message(Role.USER, "in")])).count(mark)
    if kind != "metaspace":  # whose vocabulary lacks some of these characters
        assert forged.content in tokenizer.decode(tokenizer.encode_chat([forged]))


@pytest.fixture(scope="module")
def reference(folders: dict[str, Path]) -> dict[str, object]:
    import transformers

    return {name: transformers.AutoTokenizer.from_pretrained(str(path)) for name, path in folders.items()}


def _as_transformers_does(reference: object, conversation: list[Message], answer: bool) -> list[int]:
    chat = [{"role": message.role.value, "content": message.content} for message in conversation]
    return list(
        reference.apply_chat_template(  # type: ignore[attr-defined]
            chat, add_generation_prompt=answer, tokenize=True, return_dict=False
        )
    )


@pytest.mark.parametrize("kind", ["demo", "chatml", "headers", "counting", "unmarked"])
@pytest.mark.parametrize("words", ["It is", " It is, ", "a\n"])
def test_a_continued_message_is_left_open_as_transformers_does(
    tokenizers: dict[str, ChatTokenizer], reference: dict[str, object], kind: str, words: str
) -> None:
    conversation = [Message(Role.USER, "Which one?"), Message(Role.ASSISTANT, words)]
    chat = [{"role": message.role.value, "content": message.content} for message in conversation]
    expected = reference[kind].apply_chat_template(  # type: ignore[attr-defined]
        chat, continue_final_message=True, tokenize=True, return_dict=False
    )
    kwargs = {"continue_final_message": True, "add_generation_prompt": False}
    assert list(tokenizers[kind].encode_chat(conversation, kwargs=kwargs)) == list(expected)
    parts = tokenizers[kind].encode_parts(conversation, (0, 1), kwargs=kwargs)
    assert joined(parts.token_ids) == tuple(expected) and parts.ends[1] < len(expected)
    bare = {"add_generation_prompt": False}
    assert list(tokenizers[kind].encode_chat(conversation[:1], kwargs=bare)) == _as_transformers_does(
        reference[kind], conversation[:1], False
    )


@pytest.mark.parametrize("kind", ["demo", "chatml", "headers", "counting", "unmarked"])
def test_conversations_have_the_ids_that_transformers_gives_them(
    tokenizers: dict[str, ChatTokenizer], reference: dict[str, object], kind: str
) -> None:
    @strategies.examples(100)
    @given(conversation=st.lists(strategies.messages, min_size=1, max_size=6), answer=st.booleans())
    def check(conversation: list[Message], answer: bool) -> None:
        expected = _as_transformers_does(reference[kind], conversation, answer)
        assert list(tokenizers[kind].encode_chat(conversation, kwargs={GENERATES: answer})) == expected

    check()


@pytest.mark.parametrize("kind", ["alternating", "metaspace"])
def test_templates_with_alternating_roles_give_the_ids_of_transformers(
    tokenizers: dict[str, ChatTokenizer], reference: dict[str, object], kind: str
) -> None:
    for talk in (ALTERNATING_TALK, ALTERNATING_TALK[:1], [Message(Role.SYSTEM, "in the"), *ALTERNATING_TALK]):
        assert list(tokenizers[kind].encode_chat(talk)) == _as_transformers_does(reference[kind], talk, True)


def test_a_template_refuses_roles_in_an_order_it_was_not_made_for(
    tokenizers: dict[str, ChatTokenizer],
) -> None:
    with pytest.raises(TemplateRefused, match="roles must alternate"):
        tokenizers["alternating"].encode_chat([Message(Role.USER, "a"), Message(Role.USER, "b")])


def test_parts_of_a_conversation_that_only_renders_whole_end_where_their_text_ends(
    tokenizers: dict[str, ChatTokenizer],
) -> None:
    tokenizer = tokenizers["alternating"]
    chat = tokenizer.encode_parts(ALTERNATING_TALK, (0, 1, 2, 3))
    assert chat.ends[0] == 0
    assert tokenizer.decode(chat.token_ids[: chat.ends[1]]) == "<s>[INST] hi [/INST]"
    assert tokenizer.decode(chat.token_ids[chat.ends[1] : chat.ends[2]]) == " hello</s>"
    assert chat.ends[3] == len(chat.token_ids)


def test_raw_texts_may_contain_control_tokens(tokenizers: dict[str, ChatTokenizer]) -> None:
    tokenizer = tokenizers["chatml"]
    assert tokenizer.tokens(tokenizer.encode("<|im_start|>"))[0] == "<|im_start|>"


@given(text=strategies.hostile_texts)
def test_decoding_gives_the_text_back(tokenizer: ChatTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_ids_outside_the_vocabulary_are_refused(tokenizer: ChatTokenizer) -> None:
    for bad in (-1, tokenizer.vocabulary, 2**40):
        assert tokenizer.unknown_id([0, bad]) == bad
        with pytest.raises(ValueError, match="not in the vocabulary"):
            tokenizer.decode([0, bad])
        with pytest.raises(ValueError, match="not in the vocabulary"):
            tokenizer.tokens([bad])
    assert tokenizer.unknown_id([]) is None


def test_an_unused_id_inside_a_vocabulary_is_unknown(tmp_path: Path) -> None:
    tokenizer = byte_level(["<|im_start|>", "<|im_end|>"])
    text = tokenizer.to_str().replace('"id":1,"content":"<|im_end|>"', '"id":999,"content":"<|im_end|>"')
    folder = write_folder(tmp_path, tokenizer, CHATML)
    (folder / "tokenizer.json").write_text(
        text.replace('"<|im_end|>":1,', '"<|im_end|>":999,'), encoding="utf-8"
    )
    loaded = ChatTokenizer(folder)
    assert loaded.vocabulary == 1000
    assert loaded.unknown_id([999, 1]) == 1
    with pytest.raises(ValueError, match="token id 700"):
        loaded.decode([700])


def test_the_cache_is_bounded_in_bytes_and_forgets_what_is_not_used(folders: dict[str, Path]) -> None:
    bound = 40_000
    tokenizer = ChatTokenizer(folders["chatml"], cache_bytes=bound)
    used = Message(Role.USER, "in the story of Vinland")
    for number in range(400):
        tokenizer.encode_chat([used, Message(Role.USER, f"in the story {number}")])
        assert tokenizer.cache_bytes <= bound
    newest, oldest = Message(Role.USER, "in the story 399"), Message(Role.USER, "in the story 0")
    assert tokenizer.unseen_chars([used, newest]) == 0
    assert tokenizer.unseen_chars([used, oldest]) > len(oldest.content)
    long = Message(Role.USER, "story " * 4000)
    tokenizer.encode_chat([long])
    assert tokenizer.unseen_chars([long, newest]) > len(long.content)


def test_the_reasoning_of_an_earlier_answer_counts_as_text_to_encode(folders: dict[str, Path]) -> None:
    thoughts = "in the story " * 4000
    answer = Message(Role.ASSISTANT, "yes", reasoning=thoughts)
    assert ChatTokenizer(folders["chatml"]).unseen_chars([answer]) > len(thoughts)


def test_threads_share_a_tokenizer(tokenizers: dict[str, ChatTokenizer]) -> None:
    tokenizer = tokenizers["chatml"]
    talks = [[Message(Role.USER, f"manga {i % 7} " * 20), Message(Role.ASSISTANT, "in")] for i in range(64)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(tokenizer.encode_chat, talks))
    assert found == [tokenizer.encode_parts_whole(talk, ()).token_ids for talk in talks]


def test_a_malformed_template_names_the_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(["<|im_start|>"]), "{% for %}")
    with pytest.raises(TokenizerError, match=f"{folder}: the chat template is malformed"):
        ChatTokenizer(folder)
