"""Structured output: text that follows a JSON schema, a pattern, a choice or a grammar, by llguidance.

A grammar is built once, in a thread, while the steps continue; requests of the same shape share it. Each
sequence follows it with a matcher, advanced by the tokens of the output alone, so it is right after a
preemption too. Before each token the logits of all forbidden ones become minus infinity; when only the end
may follow, the text is complete.

JSON is written on one line, with at most one blank after a comma or colon: a model that likes white space
could otherwise write it for ever.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from engine.errors import InvalidGrammar
from engine.grammars import MAX_LEXER_STATES, Grammar, build_grammar, parser_limits, problem_of
from engine.values import StructuredOutput

# Grammars kept, in number and in memory; the least recently used is forgotten first.
MAX_GRAMMARS = 64
MAX_GRAMMARS_BYTES = 256 << 20
# Processor time that the masks of one text may take: a share for each token, and a sum above these shares.
# The whole batch waits for a mask. With a vocabulary of 150,000 an ordinary mask takes 5 ms, the slowest 30.
MASK_TOKEN_S = 0.01
MASK_BURST_S = 0.5


class Matcher:
    """The position of one text in a grammar. ``clock`` is the processor time of this thread."""

    __slots__ = ("_clock", "_inner", "_over_s")

    def __init__(self, grammar: Grammar, clock: Callable[[], float] = time.thread_time) -> None:
        self._inner = grammar.deep_copy()
        self._clock = clock
        self._over_s = 0.0

    def allowed(self) -> bytes:
        """The tokens that may come next: a bit for each of the vocabulary, the lowest of a byte first."""
        started = self._clock()
        mask = self._inner.compute_bitmask()
        self._over_s = max(0.0, self._over_s + self._clock() - started - MASK_TOKEN_S)
        return mask

    def accept(self, token_id: int) -> bool:
        """Take the next token; True when the text is complete. Raises InvalidGrammar when the grammar has
        become too complex, or too slow, to follow.
        """
        if self._over_s > MASK_BURST_S:
            raise InvalidGrammar(
                f"the shape is too slow to follow: its masks took {MASK_BURST_S:g} s more than "
                f"{MASK_TOKEN_S:g} s a token"
            )
        if not self._inner.consume_token(token_id):
            raise InvalidGrammar(f"the shape became too complex to follow: {problem_of(self._inner)}")
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
        self._limits = parser_limits(max_lexer_states)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._built: OrderedDict[StructuredOutput, Future[Grammar]] = OrderedDict()
        self._bytes = 0
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
            self._bytes += shape.grammar_bytes
            while len(self._built) > 1 and (
                len(self._built) > MAX_GRAMMARS or self._bytes > MAX_GRAMMARS_BYTES
            ):
                self._bytes -= self._built.popitem(last=False)[0].grammar_bytes
        self._built.move_to_end(shape)
        return future

    def _build(self, shape: StructuredOutput) -> Grammar:
        if self._tokenizer is None:
            raise InvalidGrammar(f"this model's tokenizer cannot be held to a shape: {self._problem}")
        try:
            return build_grammar(self._tokenizer, shape, self._limits)
        except ValueError as error:
            raise InvalidGrammar(str(error)) from error


def forbid(logits: torch.Tensor, rows: Sequence[int], matchers: Sequence[Matcher]) -> None:
    """Set to minus infinity all of row ``rows[i]`` that ``matchers[i]`` does not allow, in place."""
    packed = np.frombuffer(b"".join([matcher.allowed() for matcher in matchers]), np.uint8)
    bits = np.unpackbits(packed.reshape(len(rows), -1), axis=1, count=logits.shape[1], bitorder="little")
    forbidden = torch.from_numpy(bits == 0).to(logits.device)
    where = torch.tensor(rows, device=logits.device)
    logits[where] = logits[where].masked_fill_(forbidden, -torch.inf)
