"""Grammars by llguidance: the limits that they are built with, and a check of one in another process.

Building is not bounded by llguidance's own limits: ``multipleOf: 999979`` takes 15 s and 540 MB whatever they
are, ``minItems: 1000000000`` ends the process. So the gateway builds each grammar first in a process that it
may kill (``prepare_check``), and only what was built there within its bounds reaches an engine.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from engine.values import GrammarKind, StructuredOutput

# States that a grammar's lexer may come to, at 1 to 2 kB each; ordinary schemas need some hundreds.
MAX_LEXER_STATES = 50_000
# Work for the mask of one token. With llguidance's own bound, ten times as high, a token took up to 1.5 s;
# with this one up to 50 ms. Ordinary schemas stay below it, with 150,000 tokens too.
STEP_LEXER_FUEL = 20_000
# The longest message about a faulty grammar.
MAX_PROBLEM_CHARS = 300
# Tokens that a check generates: what is quick to build may be slow to follow.
CHECKED_TOKENS = 32

Grammar = LLMatcher  # at its beginning


def parser_limits(max_lexer_states: int = MAX_LEXER_STATES) -> LLParserLimits:
    """llguidance's own limits."""
    return LLParserLimits(
        max_lexer_states=max_lexer_states,
        step_lexer_fuel=STEP_LEXER_FUEL,
        verbose_errors=False,
    )


def build_grammar(tokenizer: LLTokenizer, shape: StructuredOutput, limits: LLParserLimits) -> Grammar:
    """The grammar of ``shape``. Raises ValueError: the shape is malformed, unsupported or over ``limits``."""
    try:
        source = _source(shape)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the {shape.kind.value} is not valid: {error}") from error
    grammar = Grammar(tokenizer, source, log_level=0, limits=limits)
    if not grammar.is_error():
        grammar.compute_bitmask()  # what this finds out, every matcher of the grammar knows
    if grammar.is_error():
        raise ValueError(f"the {shape.kind.value} is not valid: {problem_of(grammar)}")
    return grammar


def problem_of(grammar: Grammar) -> str:
    """What llguidance says is wrong, on one line."""
    return " ".join(grammar.get_error().split())[:MAX_PROBLEM_CHARS]


def prepare_check(tokenizer_json: str) -> Callable[[bytes], bytes]:
    """A check of shapes (JSON of kind and text): the bytes of the grammar, or what is wrong with it.

    ``tokenizer_json`` is the path of the model's tokenizer. One that llguidance does not take is replaced by
    single bytes: a grammar costs about the same with them.
    """
    try:
        tokenizer = LLTokenizer(Path(tokenizer_json).read_text(encoding="utf-8"))
    except ValueError:
        tokenizer = LLTokenizer("byte")
    limits = parser_limits()

    def check(job: bytes) -> bytes:
        kind, spec = json.loads(job)
        before = _resident_bytes()
        try:
            grammar = build_grammar(tokenizer, StructuredOutput(GrammarKind(kind), spec), limits)
            _follow(grammar.deep_copy())
        except ValueError as error:
            return json.dumps({"problem": str(error), "complex": _is_over_a_bound(str(error))}).encode()
        return json.dumps({"bytes": max(0, _resident_bytes() - before)}).encode()

    return check


def _is_over_a_bound(problem: str) -> bool:
    """Whether llguidance refused a valid shape for its size; it has no codes for this."""
    return any(
        word in problem for word in ("fuel", "too big", "too complex", "too deeply", "too large", "too many")
    )


def _follow(grammar: Grammar) -> None:
    """Generate some tokens. Raises ValueError when one takes more work than ``STEP_LEXER_FUEL``."""
    draw = random.Random(0)
    for _ in range(CHECKED_TOKENS):
        mask = int.from_bytes(grammar.compute_bitmask(), "little")
        token = _some_bit(mask, draw)
        if token is None or not grammar.consume_token(token) or grammar.is_stopped():
            break
    if grammar.is_error():
        raise ValueError(f"the shape is too complex to follow: {problem_of(grammar)}")


def _some_bit(mask: int, draw: random.Random) -> int | None:
    """The number of one bit that is set: the first one from a random place on."""
    if not mask:
        return None
    start = draw.randrange(mask.bit_length())
    rest = mask >> start
    return start + (rest & -rest).bit_length() - 1


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0  # not on Linux


def _source(shape: StructuredOutput) -> str:
    """The shape in llguidance's own language. Raises ValueError or RecursionError."""
    if shape.kind is GrammarKind.JSON_OBJECT:
        return _json_source({"type": "object"})
    if shape.kind is GrammarKind.JSON_SCHEMA:
        return _json_source(json.loads(shape.spec))
    if shape.kind is GrammarKind.CHOICE:
        return grammar_from("choice", shape.spec)
    if shape.kind is GrammarKind.REGEX:
        return grammar_from("regex", shape.spec)
    return grammar_from("gbnf" if "::=" in shape.spec else "lark", shape.spec)


def _json_source(schema: object) -> str:
    if not isinstance(schema, dict):
        raise ValueError("a schema is an object")
    return LLMatcher.grammar_from_json_schema(
        schema,
        overrides={"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"},
    )
