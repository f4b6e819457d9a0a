"""Structured output: text that follows a JSON schema, a pattern, a choice or a grammar, by llguidance.

A grammar is built once, in a thread, while the steps continue; requests of the same shape share it. Each
sequence follows it with a matcher, advanced by the tokens of the output alone, so it is right after a
preemption too. Before each token the logits of all forbidden ones become minus infinity; when only the end
may follow, the text is complete.

JSON is written on one line, with at most one blank after a comma or colon: a model that likes white space
could otherwise write it for ever.
"""

import json
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from tokenizers import Tokenizer

from engine.errors import InvalidGrammar
from engine.values import GrammarKind, StructuredOutput

# Grammars kept; the least recently used is forgotten first.
MAX_GRAMMARS = 64
# States that a grammar's lexer may come to, at 1 to 2 kB each; ordinary schemas need some hundreds.
MAX_LEXER_STATES = 50_000
# The longest message about a faulty grammar.
MAX_PROBLEM_CHARS = 300

Grammar = LLMatcher  # at its beginning


class Matcher:
    """The position of one text in a grammar."""

    __slots__ = ("_inner",)

    def __init__(self, grammar: Grammar) -> None:
        self._inner = grammar.deep_copy()

    def allowed(self) -> bytes:
        """The tokens that may come next: a bit for each of the vocabulary, the lowest of a byte first."""
        return self._inner.compute_bitmask()

    def accept(self, token_id: int) -> bool:
        """Take the next token; True when the text is complete. Raises InvalidGrammar when the grammar has
        become too complex to follow.
        """
        if not self._inner.consume_token(token_id):
            raise InvalidGrammar(f"the shape became too complex to follow: {_problem(self._inner)}")
        return self._inner.is_stopped()

    def resume(self, token_ids: Sequence[int]) -> bool:
        """Take the tokens of a partial answer; True when the text is complete with them. Raises
        InvalidGrammar when they are not of this shape.
        """
        for token_id in token_ids:
            if self._inner.is_stopped() or not self._inner.consume_token(token_id):
                raise InvalidGrammar("the partial answer does not match the requested format")
        return self._inner.is_stopped() if token_ids else False


class Grammars:
    """Builds grammars for one tokenizer, and caches the recently used ones."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        max_lexer_states: int = MAX_LEXER_STATES,
    ) -> None:
        self._limits = LLParserLimits(max_lexer_states=max_lexer_states, verbose_errors=False)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._built: OrderedDict[StructuredOutput, Future[Grammar]] = OrderedDict()
        self._tokenizer: LLTokenizer | None = None
        try:
            self._tokenizer = LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=[*eos_token_ids])
        except ValueError as error:
            self._problem = str(error)

    def build(self, shape: StructuredOutput) -> Future[Grammar]:
        """The grammar of ``shape``, when it is built; the future raises InvalidGrammar."""
        future = self._built.get(shape)
        if future is None:
            future = self._built[shape] = self._thread.submit(self._build, shape)
            if len(self._built) > MAX_GRAMMARS:
                self._built.popitem(last=False)
        self._built.move_to_end(shape)
        return future

    def _build(self, shape: StructuredOutput) -> Grammar:
        if self._tokenizer is None:
            raise InvalidGrammar(f"this model's tokenizer cannot be held to a shape: {self._problem}")
        try:
            source = _source(shape)
        except (ValueError, RecursionError) as error:
            raise InvalidGrammar(f"the {shape.kind.value} is not valid: {error}") from error
        grammar = Grammar(self._tokenizer, source, log_level=0, limits=self._limits)
        grammar.compute_bitmask()  # what this finds out, every matcher of the grammar knows
        if grammar.is_error():
            raise InvalidGrammar(f"the {shape.kind.value} is not valid: {_problem(grammar)}")
        return grammar


def forbid(logits: torch.Tensor, rows: Sequence[int], matchers: Sequence[Matcher]) -> None:
    """Set to minus infinity all of row ``rows[i]`` that ``matchers[i]`` does not allow, in place."""
    packed = np.frombuffer(b"".join([matcher.allowed() for matcher in matchers]), np.uint8)
    bits = np.unpackbits(packed.reshape(len(rows), -1), axis=1, count=logits.shape[1], bitorder="little")
    forbidden = torch.from_numpy(bits == 0).to(logits.device)
    where = torch.tensor(rows, device=logits.device)
    logits[where] = logits[where].masked_fill_(forbidden, -torch.inf)


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


def _problem(grammar: Grammar) -> str:
    return " ".join(grammar.get_error().split())[:MAX_PROBLEM_CHARS]
