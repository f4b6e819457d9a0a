"""Structured output: text that follows a JSON schema, a pattern, a choice or a grammar, by llguidance.

A thread builds each grammar once, while the steps continue; requests with the same shape share it. Each
sequence has a matcher, which only output tokens advance, so it is also correct after a preemption. Before
each token, the logits of all forbidden tokens are set to minus infinity; when only the end may follow, the
text is complete.

JSON has one line, with at most one space after a comma or colon: without this limit a model could generate
white space without end.
"""

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from engine.errors import InvalidGrammar
from engine.grammars import Grammar, build_grammar, parser_limits, problem_of
from engine.values import GenerationRequest, GrammarKind, StructuredOutput

_JSON = frozenset({GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA})
# Strings are kept; white space between them is not.
_SPACED = re.compile(rb'("(?:[^"\\]|\\.)*+"?)|\s+', re.DOTALL)
# What may follow a number that white space has ended.
_NO_NUMBER = StructuredOutput(GrammarKind.REGEX, r"(?s:[^0-9.eE].*)?")
# Most cached grammars, by number and by memory; the least recently used is evicted first.
MAX_GRAMMARS = 64
MAX_GRAMMARS_BYTES = 256 << 20
# CPU time that the masks of one text may take: so much for each token, and so much more in total. The whole
# batch waits for a mask. With a vocabulary of 150,000 an ordinary mask takes 5 ms, the slowest 30 ms.
MASK_TOKEN_S = 0.01
MASK_BURST_S = 0.5
_OTHER_FORMAT = "the partial answer does not match the requested format"


class PartialText(NamedTuple):
    """The tokens of a partial answer, and the mask of the tokens that may follow them; ``None``: any."""

    token_ids: Sequence[int]
    next_mask: bytes | None = None


class Matcher:
    """The position of one text in a grammar. ``clock`` is the CPU time of this thread."""

    __slots__ = ("_clock", "_inner", "_next", "_over_s")

    def __init__(self, grammar: Grammar, clock: Callable[[], float] = time.thread_time) -> None:
        self._inner = grammar.deep_copy()
        self._clock = clock
        self._next: bytes | None = None  # the next token must also be one of this mask
        self._over_s = 0.0

    def allowed(self) -> bytes:
        """The mask of the tokens that may come next: one bit per token, the lowest bit of a byte first."""
        started = self._clock()
        mask = self._inner.compute_bitmask()
        if self._next is not None:
            mask = _both(mask, self._next)
        self._over_s = max(0.0, self._over_s + self._clock() - started - MASK_TOKEN_S)
        return mask

    def accept(self, token_id: int) -> bool:
        """Accept the next token; true when the text is complete. Raises InvalidGrammar when the grammar has
        become too complex, or too slow, to follow.
        """
        if self._over_s > MASK_BURST_S:
            raise InvalidGrammar(
                f"the shape is too slow to follow: its masks took {MASK_BURST_S:g} s more than "
                f"{MASK_TOKEN_S:g} s a token"
            )
        if not self._inner.consume_token(token_id):
            raise InvalidGrammar(f"the shape became too complex to follow: {problem_of(self._inner)}")
        self._next = None
        return self._inner.is_stopped()

    def resume(self, partial: PartialText) -> bool:
        """Accept a partial answer; true when it completes the text. Raises InvalidGrammar when it does not
        match the shape.
        """
        for token_id in partial.token_ids:
            if self._inner.is_stopped() or not self._inner.consume_token(token_id):
                raise InvalidGrammar(_OTHER_FORMAT)
        if self._inner.is_stopped():
            return bool(partial.token_ids)
        self._next = partial.next_mask
        if self._next is not None and not any(self.allowed()):
            raise InvalidGrammar(_OTHER_FORMAT)
        return False


class Grammars:
    """Builds grammars for one tokenizer, and caches the recently used ones."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._limits = parser_limits()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._built: OrderedDict[StructuredOutput, Future[Grammar]] = OrderedDict()
        self._bytes = 0
        self._tokenizer: LLTokenizer | None = None
        try:
            self._tokenizer = LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=[*eos_token_ids])
        except ValueError as error:
            self._problem = str(error)

    def build(self, shape: StructuredOutput) -> Future[Grammar]:
        """A future of the grammar of ``shape``, built or cached; it raises InvalidGrammar."""
        future = self._built.get(shape)
        if future is None:
            future = self._built[shape] = self._thread.submit(self._build, shape)
            self._bytes += shape.grammar_bytes
            while len(self._built) > 1 and (
                len(self._built) > MAX_GRAMMARS or self._bytes > MAX_GRAMMARS_BYTES
            ):
                self._bytes -= self._built.popitem(last=False)[0].grammar_bytes
        self._built.move_to_end(shape)
        return future

    def partial_text(self, request: GenerationRequest, grammar: Grammar) -> PartialText:
        """The partial answer; JSON in which another engine wrote more white space, without it."""
        token_ids, shape = request.partial_token_ids, request.sampling.structured
        if shape is None or shape.kind not in _JSON or self._tokenizer is None:
            return PartialText(token_ids)
        if grammar.deep_copy().validate_tokens([*token_ids]) == len(token_ids):
            return PartialText(token_ids)
        text = self._tokenizer.decode_bytes([*token_ids])
        dense = _SPACED.sub(rb"\1", text)
        number_ended = text[-1:].isspace() and dense[-1:].isdigit()
        # Built here, in 1 ms: the thread may be busy with a slow grammar.
        mask = self._build(_NO_NUMBER).compute_bitmask() if number_ended else None
        return PartialText(self._tokenizer.tokenize_bytes(dense), mask)

    def _build(self, shape: StructuredOutput) -> Grammar:
        if self._tokenizer is None:
            raise InvalidGrammar(f"this model's tokenizer cannot be held to a shape: {self._problem}")
        try:
            return build_grammar(self._tokenizer, shape, self._limits)
        except ValueError as error:
            raise InvalidGrammar(str(error)) from error


def _both(mask: bytes, other: bytes) -> bytes:
    both = int.from_bytes(mask, "little") & int.from_bytes(other, "little")
    return both.to_bytes(len(mask), "little")


def forbid(logits: torch.Tensor, rows: Sequence[int], matchers: Sequence[Matcher]) -> None:
    """In row ``rows[i]``, set the logits that ``matchers[i]`` does not allow to minus infinity, in place."""
    packed = np.frombuffer(b"".join([matcher.allowed() for matcher in matchers]), np.uint8)
    bits = np.unpackbits(packed.reshape(len(rows), -1), axis=1, count=logits.shape[1], bitorder="little")
    forbidden = torch.from_numpy(bits == 0).to(logits.device)
    where = torch.tensor(rows, device=logits.device)
    logits[where] = logits[where].masked_fill_(forbidden, -torch.inf)
