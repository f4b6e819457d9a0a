"""An engine that computes nothing but takes a GPU's time, so that what is in front of it is measured.

Each sequence in the batch gets one token per step; a step takes as long whatever the batch holds, as
decoding on a GPU nearly does. An answer depends on its prompt alone and can continue from its own token ids,
so that a broken and resumed answer can be compared with an uninterrupted one.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Callable, Sequence

import psutil

from admission.values import BackendLoad
from budgeting.counting import ChatTokenizer
from engine.errors import EngineDead
from gateway.backends.host import EngineFacts, EngineHost, MakeHost
from gateway.backends.partial_answer import check_partial
from gateway.backends.port import Backend, BackendState, Completion, Continue, DeltaSink, Work
from gateway.config.settings import Settings
from gateway.contracts.events import Delta
from gateway.contracts.features import Feature
from gateway.contracts.values import FinishReason, Usage
from observability.events import EngineFigures
from resilience.heartbeat import NO_PROMPTS

# vLLM with an 8B model on one GPU takes 15 to 25 ms per token.
STEP_S = 0.020
# Size of the reported KV pool; 16 tokens per block is the gateway's default.
BLOCKS, BLOCK_SIZE = 4_096, 16
# Number of different words in the answers.
WORDS = 64


class PacedHost:
    """An engine host of this kind; see :class:`gateway.backends.host.EngineHost`.

    Args:
        words: token ids that are one plain word each, and their texts.
        model: the base model's public id.
        max_running: sequences in a batch; further ones wait.
        max_model_len: longest sequence, in tokens.
        step_s: how long a step takes.
        on_step: called after each step.
    """

    def __init__(
        self,
        words: Sequence[tuple[int, str]],
        *,
        model: str,
        max_running: int,
        max_model_len: int,
        step_s: float,
        on_step: Callable[[int], None],
    ) -> None:
        self._words = words
        self._model = model
        self._max_running = max_running
        self._max_model_len = max_model_len
        self._step_s = step_s
        self._on_step = on_step
        self._places = asyncio.Semaphore(max_running)
        self._lengths: dict[int, int] = {}
        self._numbers = itertools.count()
        self.unfinished = self.computed_tokens = 0
        self.pending = NO_PROMPTS
        self.occupied, self.last_error = False, ""
        self.state = BackendState.STARTING
        self.facts: EngineFacts | None = None
        self.exit_code: int | None = None

    @property
    def load(self) -> BackendLoad:
        """Return the engine's current load."""
        running = len(self._lengths)
        kv_usage = sum(self._lengths.values()) / (BLOCKS * BLOCK_SIZE)
        return BackendLoad(
            running, self.unfinished - running, min(1.0, kv_usage), BLOCKS, BLOCK_SIZE, self._max_running
        )

    def figures(self) -> EngineFigures | None:
        """Return the load as engine figures."""
        return EngineFigures(self._model, self.load)

    def find_processes(self) -> Sequence[psutil.Process]:
        """Return nothing: the engine has no processes."""
        return ()

    async def start(self) -> EngineFacts:
        """Become ready at once."""
        self.facts = EngineFacts(self._max_model_len, BLOCK_SIZE, BLOCKS)
        self.state = BackendState.READY
        return self.facts

    async def stop(self, timeout_s: float) -> None:
        """Stop at once."""
        self.state = BackendState.STOPPED

    def backend(self, name: str) -> Backend:
        """The engine as a backend."""
        return PacedBackend(name, self._model, self)

    async def generate(self, work: Work, out: DeltaSink) -> Completion:
        """Answer at the engine's pace."""
        check_partial(work, frozenset({Continue.TOKENS}), "paced")
        there = work.partial_ids
        seed = hashlib.blake2b(repr(work.token_ids).encode(), digest_size=16).digest()
        most = work.sampling.max_tokens or 1
        self.unfinished += 1
        try:
            async with self._places:
                number = next(self._numbers)
                try:
                    for place in range(len(there), len(there) + most):
                        self._lengths[number] = len(work.token_ids) + place
                        await asyncio.sleep(self._step_s)
                        self._on_step(0)
                        drawn = hashlib.blake2b(place.to_bytes(4, "big"), key=seed, digest_size=4).digest()
                        token_id, text = self._words[int.from_bytes(drawn, "big") % len(self._words)]
                        await out(Delta(text, 1, token_ids=(token_id,)))
                finally:
                    self._lengths.pop(number, None)
        finally:
            self.unfinished -= 1
        return Completion(FinishReason.LENGTH, Usage(len(work.token_ids), most))


class PacedBackend:
    """The engine as a backend with a name."""

    kind = "embedded"
    features = frozenset(Feature) - {Feature.LORA}
    continues = frozenset({Continue.TOKENS})

    def __init__(self, name: str, model: str, host: PacedHost) -> None:
        self.name = name
        self.model = model
        self._host = host

    @property
    def state(self) -> BackendState:
        """Return the engine's state."""
        return self._host.state

    @property
    def load(self) -> BackendLoad | None:
        """Return the engine's load."""
        return self._host.load

    async def generate(self, work: Work, out: DeltaSink) -> Completion:
        """Generate an answer."""
        return await self._host.generate(work, out)


def paced_engine(settings: Settings, *, step_s: float = STEP_S) -> MakeHost:
    """Return a function that makes a paced engine for a gateway's settings."""
    tokenizer = ChatTokenizer(settings.engine.tokenizer_folder)
    words = plain_words(tokenizer.token_bytes, settings.engine.tokenizer_folder.name)

    def make(
        *,
        on_step: Callable[[int], None],
        on_death: Callable[[EngineDead], None],
        kv_blocks: int | None = None,
    ) -> EngineHost:
        return PacedHost(
            words,
            model=settings.engine.model_id,
            max_running=settings.engine.max_num_seqs,
            max_model_len=settings.engine.max_model_len,
            step_s=step_s,
            on_step=on_step,
        )

    return make


def plain_words(token_bytes: Callable[[int], bytes], model: str) -> Sequence[tuple[int, str]]:
    """Return the first tokens that are a space and a lower-case word.

    Raises:
        ValueError: the tokenizer has too few of them.
    """
    words = []
    for token_id in range(256, 20_000):
        try:
            data = token_bytes(token_id)
        except (IndexError, KeyError, ValueError):
            break
        if data[:1] == b" " and data[1:].isalpha() and data[1:].islower():
            words.append((token_id, data.decode("ascii")))
        if len(words) == WORDS:
            return words
    raise ValueError(f"the tokenizer of {model} has {len(words)} plain words; needed: {WORDS}")
