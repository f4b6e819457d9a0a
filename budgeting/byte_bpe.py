"""A ``tiktoken`` encoding made from a byte-level BPE ``tokenizer.json``, where both give the same ids.

``tokenizers`` merges the pair that comes first in its list of merges, ``tiktoken`` the pair whose token has
the lowest rank. Both give the same ids when

* every merge is made of single bytes and of results of earlier merges;
* the merges that spell one token are adjacent in the list;
* merging the bytes of a token gives that token (other tokens are left out of the encoding).

Both libraries then make the tokens in the same order: when no merge before token *t* applies any more and two
neighbours spell *t*, nothing was merged across their outer edges. So the bytes of *t* alone would have become
the same two neighbours, and a listed merge of exactly these two makes them *t*.

Normalizer and pre-tokenizer must be ones that ``tiktoken`` can express in one regular expression: those of
the GPT-2, Llama 3, Qwen 2 and o200k families, and GPT-2's with single digits.
"""

import itertools
import json
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

import tiktoken
from tokenizers import Tokenizer

_BLANK = "\u2581"  # how SentencePiece writes a blank
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """Turns the vocabulary's own strings into the bytes they stand for.

    Byte-level vocabularies write each byte as one printable character; the others write plain text, spaces as
    U+2581, and bytes of characters that they do not have as ``<0xE3>``.
    """

    def __init__(self, tokenizer_json: str) -> None:
        decoder = json.loads(tokenizer_json).get("decoder") or {}
        kinds = {part.get("type") for part in (decoder, *decoder.get("decoders", ()))}
        self._bytes = bytes_of_characters() if "ByteLevel" in kinds else {}

    def of(self, token: str) -> bytes:
        """The bytes of a token that is not a control token."""
        if self._bytes:
            return b"".join([self._bytes.get(character, character.encode()) for character in token])
        byte = _BYTE.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(_BLANK, " ").encode()


def bytes_of_characters() -> dict[str, bytes]:
    """Byte by character: printable Latin-1 characters stand for themselves, U+0100 and on for the others."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): bytes([byte]) for byte in printable}
    return table | {chr(0x100 + place): bytes([byte]) for place, byte in enumerate(others)}


# Longer texts go to `tokenizers`: tiktoken's expressions backtrack, and give up on very long runs of blanks.
MAX_CHARS = 65_536

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_ANY_CASE = f"(?i:{_CONTRACTIONS})"
_GPT2 = _CONTRACTIONS + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Digits are cut out first, one by one, so blanks before a digit are at the end of a piece of text.
_GPT2_DIGITS = r"\p{N}|" + _CONTRACTIONS + r"| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# Expressions that put every character into some word; with others tiktoken could lose text.
_KNOWN_EXPRESSIONS = frozenset(
    {
        _GPT2,
        "|".join((_ANY_CASE, _LETTERS, r"\p{N}{1,3}", _OTHERS, _BLANKS)),  # Llama 3
        "|".join((_ANY_CASE, _LETTERS, r"\p{N}", _OTHERS, _BLANKS)),  # Qwen 2
        "|".join(  # o200k
            (
                rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ANY_CASE}?",
                rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ANY_CASE}?",
                r"\p{N}{1,3}",
                r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
                _BLANKS,
            )
        ),
    }
)


class NotByteBpe(Exception):
    """Equal ids in ``tiktoken`` cannot be shown for a ``tokenizer.json``; the message says why."""


class ByteBpe:
    """Encodes plain text with ``tiktoken``. Thread-safe; releases the GIL while it encodes.

    Raises NotByteBpe when the ids of this ``tokenizer.json`` could differ from those of ``tokenizers``.
    """

    def __init__(self, tokenizer_json: str) -> None:
        data = json.loads(tokenizer_json)
        model = data.get("model") or {}
        _check_model(model)
        self._composes = _composes(data.get("normalizer"))
        expression = _expression(data.get("pre_tokenizer"))
        order = _order(data)
        table = bytes_of_characters()
        spelled = [b"".join([table[character] for character in token]) for token in order]
        ids = [model["vocab"][token] for token in order]
        made = ids[256:]
        if all(a < b for a, b in itertools.pairwise(made)):
            ranks = dict(zip(spelled, ids, strict=True))
            self._ids: list[int] | None = None
        else:
            ranks = {token: rank for rank, token in enumerate(spelled)}
            self._ids = ids
        self._encoding = tiktoken.Encoding(
            "tokenizer.json", pat_str=_grouped(expression), mergeable_ranks=ranks, special_tokens={}
        )

    def ids(self, text: str) -> list[int] | None:
        """Ids of a text without added tokens; ``None`` when ``tokenizers`` must encode it."""
        if len(text) > MAX_CHARS:
            return None
        if self._composes and not text.isascii() and not _composed(text):
            return None
        found = self._encoding.encode_ordinary(text)
        return found if self._ids is None else [self._ids[rank] for rank in found]


def _composed(text: str) -> bool:
    """Whether normalizing to NFC changes nothing, by this version of Unicode and by every later one.

    Assigned characters keep their normal form; one that is not assigned yet may get a different one.
    """
    return unicodedata.is_normalized("NFC", text) and all(
        unicodedata.category(character) != "Cn" for character in set(text) if not character.isascii()
    )


def _check_model(model: Mapping[str, Any]) -> None:
    if model.get("type", "BPE") != "BPE" or not isinstance(model.get("merges"), list):
        raise NotByteBpe(f"the model is {model.get('type')}, not BPE")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise NotByteBpe(f"the model has {key}")


def _composes(normalizer: Mapping[str, Any] | None) -> bool:
    """Whether the normalizer converts texts to NFC; raises NotByteBpe for any other normalizer."""
    if normalizer is None:
        return False
    if normalizer.get("type") != "NFC":
        raise NotByteBpe(f"the normalizer is {normalizer.get('type')}")
    return True


def _expression(pre_tokenizer: Mapping[str, Any] | None) -> str:
    """The regular expression that cuts words as the pre-tokenizer does. Raises NotByteBpe."""
    steps = [pre_tokenizer or {}]
    if steps[0].get("type") == "Sequence":
        steps = list(steps[0].get("pretokenizers") or ())
    last = steps[-1] if steps else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space", True):
        raise NotByteBpe("the pre-tokenizer is not byte-level, or adds a blank in front")
    first = steps[0] if len(steps) == 2 else {}
    own = last.get("use_regex", True)
    if len(steps) == 1 and own:
        return _GPT2
    if first.get("type") == "Digits" and first.get("individual_digits") and own:
        return _GPT2_DIGITS
    if first.get("type") == "Split" and not own:
        given = (first.get("pattern") or {}).get("Regex")
        if given in _KNOWN_EXPRESSIONS and first.get("behavior") == "Isolated" and not first.get("invert"):
            return str(given)
    raise NotByteBpe("the pre-tokenizer cuts words in a way of its own")


def _grouped(expression: str) -> str:
    """The same expression in a form that takes half of the time.

    The engine backtracks through the alternatives because one of them looks ahead. Those before it are
    searched as one when they are a group.
    """
    before, ahead, after = expression.partition(r"|\s+(?!")
    return f"(?:{before}){ahead}{after}"


def _order(data: Mapping[str, Any]) -> list[str]:
    """The tokens that merges can produce, single bytes first, then in the order of their merges."""
    model = data["model"]
    vocabulary: Mapping[str, int] = model["vocab"]
    singles = list(bytes_of_characters())
    if any(single not in vocabulary for single in singles):
        raise NotByteBpe("a byte has no token of its own")
    made: dict[str, None] = dict.fromkeys(singles)
    current = ""
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        whole = left + right
        if left not in made or right not in made or whole not in vocabulary:
            raise NotByteBpe("a merge uses a token that no earlier merge makes")
        if whole == current:
            continue
        if whole in made:
            raise NotByteBpe("the merges of one token do not stand together")
        made[whole] = None
        current = whole
    tokens = list(made)
    reached = _reached(data, tokens)
    if model.get("ignore_merges") and len(reached) < len(vocabulary):
        # Such a model looks up a whole word first, so a token that no merge makes can still be a whole word.
        raise NotByteBpe("ignore_merges, with tokens that no merge makes")
    return reached


def _reached(data: Mapping[str, Any], tokens: list[str]) -> list[str]:
    """The tokens whose characters, merged, give the token itself."""
    merger = Tokenizer.from_str(json.dumps({"model": {**data["model"], "ignore_merges": False}}))
    found = merger.encode_batch_fast(tokens, add_special_tokens=False)
    vocabulary: Mapping[str, int] = data["model"]["vocab"]
    return [
        token for token, encoding in zip(tokens, found, strict=True) if encoding.ids == [vocabulary[token]]
    ]
