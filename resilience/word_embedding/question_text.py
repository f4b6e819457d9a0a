"""Reads a question: which of its words may vary, and which must be the same for two questions to be one.

A small model knows few words. Those it knows may be said another way; every other word is a *fact*: a name, a
number, a term of a field it was not trained on. Facts must be equal, in order. So must the words that turn a
question around (``not``, ``without``, ``first``, ``from`` Tokyo), names that are spelled like known words
(``Monster`` in the middle of a sentence), and whatever stands in quotation marks. A model that knows nothing
of a field therefore finds little there, and nothing wrong.
"""

import re
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

# A longer text is rarely one question, and a bag of words tells little about it.
MAX_CHARS = 400

# Words that turn the meaning around: never taken as known.
TURNING = frozenset(
    """
    not no never without except only unless neither nor none nothing nobody before after than more less
    fewer most least first second third last latest next previous newest oldest best worst cheapest
    biggest smallest longest shortest longer shorter older newer cheaper both either instead other
    another two three four five six seven eight nine ten eleven twelve hundred thousand half twice once
    """.split()  # noqa: SIM905
)
# Told apart from no preposition at all, when right before a fact: `from Tokyo`, `under 50`.
DIRECTIONS = frozenset("from since until till under over above below between within via against".split())  # noqa: SIM905
_ARTICLES = frozenset("a an the my your our".split())  # noqa: SIM905
_CONTRACTIONS = {"'s": " is", "'re": " are", "'m": " am", "'ll": " will", "'ve": " have", "'d": " would"}

GAP = "_"
START = "^"

_QUOTED = re.compile(r"[\"“„«「『]([^\"“”„«»「」『』]{1,100})[\"”“»」』]")
_TOKEN = re.compile(
    r"(?P<number>\d+(?:[.,:/-]\d+)*)"
    r"|(?P<kana>[ぁ-ゖゝゞ]+)"
    r"|(?P<loan>[ァ-ヺー・]+)"
    r"|(?P<kanji>[々㐀-䶿一-鿿]+)"
    r"|(?P<word>[^\W\d_ぁ-ヿ㐀-鿿]+)"
    r"|(?P<end>[.!?。！？:;\n]+)"
    r"|(?P<sign>[+%€$£¥#&@=<>/*^~-])"
)
_NEGATION = re.compile(r"ない|ません|なく|なかっ|なし|ずに")
_EXCUSE = re.compile(r"すみません")
# Particles: of one kana each, so that they are known wherever they stand.
_PARTICLES = frozenset("はがをにでとのへもやかねよだなって")
_POSTPOSITIONS = ("から", "まで", "より", "以上", "以下", "以内", "未満")


@dataclass(frozen=True, slots=True)
class QuestionText:
    """A question as it is compared.

    Args:
        known: the known words, in order, lower case; ``GAP`` where facts stood between them.
        facts: what must be equal; ``foreign`` tells whether one of them is a plain word rather than a name
            or a number: the question is then of a field that the model was not made for.
    """

    known: tuple[str, ...]
    facts: tuple[str, ...]
    foreign: bool


class QuestionReader:
    """Reads questions by the words of a model.

    Args:
        words: the model's words.
    """

    def __init__(self, words: Collection[str]) -> None:
        self._words = words

    def read(self, text: str) -> QuestionText:
        """What of ``text`` may vary and what may not."""
        known: list[str] = []
        facts: list[str] = []
        foreign = japanese = False
        before: tuple[str, ...] = ("", "")
        after_fact = False
        for kind, word, quoted in _tokens(text):
            if kind == "end":
                before = ("", "")
                continue
            said = len(facts)
            if kind in ("kana", "loan", "kanji"):
                japanese = True
                parts, rest = self._japanese(kind, word, after_fact)
                after_fact = bool(rest) and kind != "kana"
                known += parts
                facts += rest
                foreign |= kind != "loan" and any(fact not in ("not", *_POSTPOSITIONS) for fact in rest)
                if quoted and not rest:
                    facts.append(word)
                if rest and known[-1:] != [GAP] and kind != "kana":
                    known.append(GAP)
                continue
            lower, after_fact = word.lower(), True
            named = word[:1].isupper() and before[-1] != "" and lower != "i"
            if kind == "word" and lower in self._words and not (named or quoted or lower in TURNING):
                known.append(lower)
            else:
                fact = _stem(lower) if kind == "word" else lower
                near = before[-1] if before[-1] not in _ARTICLES else before[-2]
                if near in DIRECTIONS:
                    facts.append(near)
                if not facts or facts[-1] != fact:
                    facts.append(fact)
                foreign |= kind == "word" and not word[:1].isupper() and lower not in TURNING
                if len(facts) > said and known[-1:] != [GAP]:
                    known.append(GAP)
            before = (before[-1], lower)
        if japanese:
            facts.append("日本語")  # an answer in another language is another answer
        return QuestionText(tuple(known), tuple(facts), foreign)

    def _japanese(self, kind: str, run: str, after_fact: bool) -> tuple[list[str], list[str]]:
        if kind == "loan":
            return ([run], []) if run in self._words else ([], [run])
        if kind == "kanji":
            parts = _cover(run, self._words)
            if parts is None:
                return [], [run]
            return parts, [part for part in parts if part in _POSTPOSITIONS]
        # What the model lacks of a run of kana may be a name written in them.
        pieces = bigrams(run)
        unknown = "".join(
            piece if piece not in self._words and not _PARTICLES.issuperset(piece) else "" for piece in pieces
        )
        facts = [unknown] if unknown else []
        if after_fact:
            facts += [after for after in _POSTPOSITIONS if run.startswith(after)]
        if _NEGATION.search(_EXCUSE.sub("", run)):
            facts.append("not")
        return [piece for piece in pieces if piece in self._words], facts


def features(known: Sequence[str]) -> list[str]:
    """What a model may know of a question: its words, and each with the one before it."""
    return [*known, *(f"{one} {other}" for one, other in zip((START, *known), known, strict=False))]


def bigrams(run: str) -> list[str]:
    """The pairs of neighbours in a run of kana; the run itself when it is one kana."""
    return [run[i : i + 2] for i in range(len(run) - 1)] or [run]


def plain(text: str) -> str:
    """The text in compatibility form, its contractions written out."""
    text = unicodedata.normalize("NFKC", text).replace("’", "'").strip()
    text = re.sub(r"\b(can)n?'t\b|\bcannot\b", "can not", text, flags=re.IGNORECASE)
    text = re.sub(r"n't\b", " not", text, flags=re.IGNORECASE)
    text = re.sub(r"\b(what|who|where|when|how|it|that|there|which)'s\b", r"\1 is", text, flags=re.IGNORECASE)
    for short, long in _CONTRACTIONS.items():
        # Any other 's is a possessive: no meaning of its own here.
        text = re.sub(rf"{short}\b", " " if short == "'s" else long, text)
    # A text without small letters says nothing by its capitals.
    return text.lower() if not any(c.islower() for c in text) else text


def runs(text: str) -> Iterator[tuple[str, str]]:
    """The words, numbers, signs and Japanese runs of a plain text, each with its kind."""
    for match in _TOKEN.finditer(text):
        yield match.lastgroup or "", match[0]


def _tokens(text: str) -> Iterator[tuple[str, str, bool]]:
    text = plain(text)
    quotes = [match.span(1) for match in _QUOTED.finditer(text)]
    for match in _TOKEN.finditer(text):
        quoted = any(start <= match.start() < end for start, end in quotes)
        yield match.lastgroup or "", match[0], quoted


def _stem(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def _cover(run: str, words: Collection[str]) -> list[str] | None:
    """The run as known words, the longest first from the left; ``None`` when it is not made of them."""
    parts = []
    while run:
        size = next((n for n in range(len(run), 0, -1) if run[:n] in words), 0)
        if not size:
            return None
        parts.append(run[:size])
        run = run[size:]
    return parts
