"""tiktoken gives the same ids as the tokenizers library wherever `ByteBpe` uses it instead."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from budgeting import byte_bpe
from budgeting.byte_bpe import ByteBpe, NotByteBpe
from budgeting.counting import ChatTokenizer
from budgeting.values import Message, Role
from tests.budgeting.conftest import DEMO
from tests.budgeting.folders import CHATML, CORPUS, byte_level, write_folder
from tests.budgeting.strategies import examples, hostile_texts

ALPHABET = pre_tokenizers.ByteLevel.alphabet()
EXPRESSIONS = sorted(byte_bpe._KNOWN_EXPRESSIONS)

# A line in each of many scripts, and difficult input: marks, joiners, digits, blanks, case folding.
SCRIPTS = (
    "The quick brown fox jumps over the lazy dog's back; it's 1,234.56 €!",
    "Zażółć gęślą jaźń — Ærøskøbing, Gåße, İstanbul ıI ſt ﬁ ﬆ KELVIN K",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Ο καλύμνιος σφουγγαράς ψιθύρισε πως θα βουτήξει χωρίς να διστάζει.",
    "نص حكيم له سر قاطع وذو شأن عظيم، أليس كذلك؟ ١٢٣٤",
    "דג סקרן שט בים מאוכזב ולפתע מצא לו חברה.",
    "ऋषियों को सताने वाले दुष्ट राक्षसों का अंत।  १२३",
    "আমি বাংলায় গান গাই। তমিழ் தமிழ் ಕನ್ನಡ తెలుగు മലയാളം සිංහල",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า ພາສາລາວ ភាសាខ្មែរ မြန်မာ",
    "いろはにほへと ちりぬるを。カタカナ、ﾊﾝｶｸ！？ 何か、お勧めはありますか。",
    "天地玄黃，宇宙洪荒。日月盈昃，辰宿列張。𠮷野家 ㊗️ Ⅳ ½ ²",
    "키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다.",
    "ქართული ენა Հայերեն լեզու። አማርኛ ᏣᎳᎩ ᐃᓄᒃᑎᑐᑦ ᠮᠣᠩᠭᠣᠯ བོད་ཡིག",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇯🇵 é é Å ẛ̣ \u200b\u200d\ufeff\u00ad z̷̢a̵l̶g̸o̴",
    " \t\n\r\n  \u00a0\u2003\u3000 x\r\ry\u2028z\x0b\x0c\x85 \n\n 12345 ６７ 's 'LL don'T",
    "if (a[i] != b) { return x->y; } // \\n {{ }} <|x|> %s $_ ~`^",
    "\U000e0041\U0010ffff\ufdd0\ufffe\x00\x7f\x80 \U00016b5a \U0001e7e0",
)


def llama_like(size: int, expression: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(expression), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=ALPHABET, show_progress=False)
    tokenizer.train_from_iterator([*SCRIPTS, *CORPUS], trainer)
    return tokenizer


def with_digits(size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=ALPHABET, show_progress=False)
    tokenizer.train_from_iterator([*SCRIPTS, *CORPUS], trainer)
    return tokenizer


def every_split(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer as converted from tiktoken's files: every split of a token into two tokens is a merge."""
    data = json.loads(tokenizer.to_str())
    vocab = data["model"]["vocab"]
    merges = []
    for token in sorted(vocab, key=vocab.__getitem__):
        splits = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [pair for pair in splits if pair[0] in vocab and pair[1] in vocab]
        merges += [list(pair) for pair in sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))]
    data["model"] |= {"merges": merges, "ignore_merges": True}
    return Tokenizer.from_str(json.dumps(data))


def same(fast: ByteBpe, tokenizer: Tokenizer, text: str) -> bool:
    return fast.ids(text) == tokenizer.encode(text, add_special_tokens=False).ids


TOKENIZERS = {
    "demo": lambda: Tokenizer.from_file(str(DEMO / "tokenizer.json")),
    "gpt2": lambda: byte_level([]),
    "digits": lambda: with_digits(700),
    **{
        f"expression {number}": (lambda expression=expression: llama_like(900, expression))
        for number, expression in enumerate(EXPRESSIONS)
    },
    "every split": lambda: every_split(llama_like(900, EXPRESSIONS[0])),
}


@cache
def pair(kind: str) -> tuple[ByteBpe, Tokenizer]:
    tokenizer = TOKENIZERS[kind]()
    tokenizer.encode_special_tokens = True  # control tokens in a text are encoded as text
    return ByteBpe(tokenizer.to_str()), tokenizer


@pytest.fixture(params=TOKENIZERS)
def both(request: pytest.FixtureRequest) -> tuple[ByteBpe, Tokenizer]:
    return pair(request.param)


def test_every_script_has_the_same_ids(both: tuple[ByteBpe, Tokenizer]) -> None:
    fast, tokenizer = both
    for text in (*SCRIPTS, "\n".join(SCRIPTS), "".join(SCRIPTS), " ".join(reversed(SCRIPTS)), ""):
        assert same(fast, tokenizer, text)


# These tell all classes of characters apart (digits; letters, numbers and blanks; also cases) and read every one. The
# others use the same classes, and read every tenth.
ALL_CHARACTERS = ("digits", "expression 1", "expression 3")


@cache
def assigned_characters() -> list[str]:
    """All assigned characters; of those that are named by their code, such as ideographs, every 50th."""
    assigned = [c for c in map(chr, range(0x110000)) if unicodedata.category(c) not in ("Cs", "Cn", "Co")]
    return [
        c
        for at, c in enumerate(assigned)
        if at % 50 == 0 or not unicodedata.name(c, "").endswith(f"{ord(c):X}")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_every_assigned_character_has_the_same_ids(kind: str) -> None:
    fast, tokenizer = pair(kind)
    seen = assigned_characters()[:: 1 if kind in ALL_CHARACTERS else 10]
    for at in range(0, len(seen), 4_000):
        assert same(fast, tokenizer, "".join(f" x{c}1 {c}" for c in seen[at : at + 4_000]))


@examples(150)
@given(text=st.text(max_size=60) | hostile_texts)
def test_any_text_has_the_same_ids(text: str) -> None:
    for kind in TOKENIZERS:
        assert same(*pair(kind), text), kind


@pytest.mark.parametrize("unit", ["a", " ", "あ", "\n", "ab", "'s", "1", "!", "\u0301"])
def test_long_runs_of_one_thing_have_the_same_ids(both: tuple[ByteBpe, Tokenizer], unit: str) -> None:
    fast, tokenizer = both
    text = (unit * byte_bpe.MAX_CHARS)[: byte_bpe.MAX_CHARS]
    assert same(fast, tokenizer, text)
    assert fast.ids(text + "x") is None


@st.composite
def merge_lists(draw: st.DrawFn) -> list[tuple[str, str]]:
    """Merges over three letters in any order, whether or not a text can reach them."""
    tokens = ["a", "b", "c"]
    merges: list[tuple[str, str]] = []
    for _ in range(draw(st.integers(1, 14))):
        pair = (draw(st.sampled_from(tokens)), draw(st.sampled_from(tokens)))
        if pair not in merges:
            merges.append(pair)
            if pair[0] + pair[1] not in tokens:
                tokens.append(pair[0] + pair[1])
    return merges


def handmade(merges: list[tuple[str, str]], *, turned: bool = False, **model: object) -> Tokenizer:
    """A byte-level tokenizer of exactly these merges; ``turned``: later merges have lower ids."""
    tokens = dict.fromkeys([*ALPHABET, *(left + right for left, right in merges)])
    order = list(reversed(tokens)) if turned else list(tokens)
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(order)}, merges=merges, **model))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


@examples(400)
@given(
    merges=merge_lists(),
    turned=st.booleans(),
    texts=st.lists(st.text("abc", max_size=24), min_size=8, max_size=8),
)
def test_merges_are_accepted_only_if_every_text_has_the_same_ids(
    merges: list[tuple[str, str]], turned: bool, texts: list[str]
) -> None:
    tokenizer = handmade(merges, turned=turned)
    try:
        fast = ByteBpe(tokenizer.to_str())
    except NotByteBpe:
        return
    for text in texts:
        assert same(fast, tokenizer, text)


def test_a_token_out_of_reach_of_its_merge_is_not_made() -> None:
    # The merge of `ab` is applied first, so `a` is never followed by `bc`.
    tokenizer = handmade([("a", "b"), ("b", "c"), ("a", "bc")])
    fast = ByteBpe(tokenizer.to_str())
    assert tokenizer.encode("abc").tokens == ["ab", "c"]
    assert same(fast, tokenizer, "abc abcbc")


def changed(**changes: Any) -> str:
    data: dict[str, Any] = json.loads(byte_level(["<|x|>"]).to_str())
    for key, value in changes.items():
        data[key] = {**data[key], **value} if isinstance(data.get(key), Mapping) and value else value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": {"dropout": 0.1}}, "dropout"),
        ({"model": {"byte_fallback": True}}, "byte_fallback"),
        ({"model": {"continuing_subword_prefix": "##"}}, "continuing_subword_prefix"),
        ({"model": {"type": "WordPiece"}}, "not BPE"),
        ({"model": {"ignore_merges": True}}, "tokens that no merge makes"),
        ({"normalizer": {"type": "NFKC"}}, "normalizer is NFKC"),
        ({"pre_tokenizer": None}, "not byte-level"),
        ({"pre_tokenizer": {"add_prefix_space": True}}, "adds a blank"),
        ({"pre_tokenizer": {"use_regex": False}}, "a way of its own"),
    ],
)
def test_a_tokenizer_that_could_differ_is_refused_with_a_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotByteBpe, match=reason):
        ByteBpe(changed(**changes))


def test_merges_in_an_order_of_their_own_are_refused() -> None:
    apart = handmade([("a", "b"), ("b", "c"), ("ab", "c"), ("c", "a"), ("a", "bc")])
    with pytest.raises(NotByteBpe, match="do not stand together"):
        ByteBpe(apart.to_str())
    early = json.loads(handmade([("a", "b"), ("ab", "c")]).to_str())
    early["model"]["merges"].reverse()
    with pytest.raises(NotByteBpe, match="no earlier merge makes"):
        ByteBpe(json.dumps(early))


def test_a_vocabulary_without_every_byte_is_refused() -> None:
    data = json.loads(handmade([("a", "b")]).to_str())
    del data["model"]["vocab"]["Ā"]
    with pytest.raises(NotByteBpe, match="a byte has no token"):
        ByteBpe(json.dumps(data))


def chat(path: Path, tokenizer: Tokenizer) -> ChatTokenizer:
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return ChatTokenizer(write_folder(path, tokenizer, CHATML, eos_token="<|im_end|>"))


def test_the_encoder_names_the_counting_library(tmp_path: Path, tokenizers: dict[str, ChatTokenizer]) -> None:
    assert tokenizers["demo"].encoder == "tiktoken"
    assert tokenizers["metaspace"].encoder == "tokenizers (the model is Unigram, not BPE)"


@examples(100)
@given(text=hostile_texts, think=st.booleans())
def test_added_tokens_inside_a_text_stay_whole(made: ChatTokenizer, text: str, think: bool) -> None:
    message = Message(Role.USER, f"{text}<think>{text}" if think else text)
    assert made.encode_chat([message]) == made.encode_parts_whole([message], (1,)).token_ids


@examples(100)
@given(text=st.text(max_size=20) | st.text("e\u0301\u0300가각a\u030aÅ\u1100\u1161", max_size=12))
def test_texts_are_normalized_if_the_tokenizer_normalizes(nfc: ChatTokenizer, text: str) -> None:
    message = Message(Role.USER, text)
    assert nfc.encoder == "tiktoken"
    assert nfc.encode_chat([message]) == nfc.encode_parts_whole([message], (1,)).token_ids


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    tokenizer = byte_level([])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("  ", normalized=True)])
    return chat(tmp_path_factory.mktemp("added"), tokenizer)


@pytest.fixture(scope="module")
def nfc(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    tokenizer = llama_like(700, EXPRESSIONS[-1])
    tokenizer.normalizer = normalizers.NFC()
    return chat(tmp_path_factory.mktemp("nfc"), tokenizer)
