"""Grammars by llguidance: their limits, and the check of a grammar in a separate process.

llguidance's limits do not bound the building of a grammar: ``multipleOf: 999979`` takes 15 s and 540 MB with
any limits, ``minItems: 1000000000`` ends the process. So the gateway first builds each grammar in a process
that it can kill (``prepare_check``), and sends only those built there within its bounds to an engine.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from engine.values import GrammarKind, StructuredOutput

# Most states of a grammar's lexer, at 1 to 2 kB each; ordinary schemas need some hundreds.
MAX_LEXER_STATES = 50_000
# Most work for the mask of one token. With llguidance's default, ten times as high, a token took up to 1.5 s,
# with this limit up to 50 ms. Ordinary schemas stay below it, also with a vocabulary of 150,000 tokens.
STEP_LEXER_FUEL = 20_000
MAX_PROBLEM_CHARS = 300  # the longest message about a faulty grammar
CHECKED_TOKENS = 32  # tokens that a check generates: a grammar that is built quickly may be slow to follow

Grammar = LLMatcher  # before its first token


def parser_limits() -> LLParserLimits:
    return LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
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
        grammar.compute_bitmask()  # all matchers of the grammar share the result
    if grammar.is_error():
        raise ValueError(f"the {shape.kind.value} is not valid: {problem_of(grammar)}")
    return grammar


def problem_of(grammar: Grammar) -> str:
    """llguidance's error message, on one line."""
    said = " ".join(grammar.get_error().replace("<non-verbose/>", "").split())[:MAX_PROBLEM_CHARS]
    return "no answer can match it" if said == "NoExtensionBias" else said


def prepare_check(tokenizer_json: str) -> Callable[[bytes], bytes]:
    """A function that checks a shape (JSON of kind and text): it returns the grammar's memory or the problem.

    ``tokenizer_json`` is the path of the model's tokenizer. If llguidance does not support it, a tokenizer of
    single bytes is used: a grammar costs about the same with it.
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
    """Whether llguidance refused a valid shape because of its size; it has no error codes for this."""
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
    """The index of a set bit: the first one from a random position on; None if there is none."""
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
    """The shape in llguidance's grammar language. Raises ValueError or RecursionError."""
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
