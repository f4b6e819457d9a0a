"""The engine: it queues requests, computes one step at a time and returns outputs. It uses no asyncio and no
sockets; its only thread builds grammars (``structured``).
"""

import random
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace

from tokenizers import Tokenizer

from engine.block_pool import BlockPool
from engine.errors import InvalidGrammar
from engine.grammars import Grammar
from engine.lora import AdapterBank, LoraWeights
from engine.penalties import adjustments_of
from engine.runner import OutOfMemory, Runner, StepResult
from engine.scheduler import Chunk, Scheduler
from engine.sequence import AdapterVersion, Sequence
from engine.structured import Grammars, Matcher
from engine.text import Detokenizer, StopStrings, text_of
from engine.values import (
    EngineInfo,
    EngineSignals,
    GenerationRequest,
    SequenceEnd,
    SequenceOutput,
    TokenIdLogprob,
)

NAN_OUTPUT = "nan_output"
OUT_OF_MEMORY = "out_of_memory"
GRAMMAR_WAIT_S = 0.01  # longest time that a step waits for a grammar when there is nothing else to do


class _Entry:
    """A sequence with its detokenizer and its stop strings."""

    __slots__ = ("detokenizer", "sequence", "stops")

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        self.sequence = sequence
        partial = sequence.request.partial_token_ids
        self.detokenizer = Detokenizer(tokenizer, partial)
        self.stops = StopStrings(sequence.request.sampling.stop)
        if partial and self.stops.stops:
            self.stops.begin(text_of(tokenizer, partial))


class Engine:
    """Continuous batching: a step may compute tokens of all requests in the engine. ``seeds`` draws a seed
    for each request that has none.
    """

    def __init__(
        self,
        *,
        info: EngineInfo,
        pool: BlockPool,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer,
        grammars: Grammars,
        clock: Callable[[], float],
        seeds: random.Random,
        adapters: AdapterBank,
    ) -> None:
        self.info = info
        self._pool = pool
        self._scheduler = scheduler
        self._runner = runner
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._building: dict[Sequence, Future[Grammar]] = {}
        self._clock = clock
        self._seeds = seeds
        self._adapters = adapters
        # Reads the weights in a PEFT folder, also while the engine steps. Raises an EngineAdapterError.
        self.read_adapter = adapters.read
        self._entries: dict[str, _Entry] = {}
        self._eos = frozenset(info.eos_token_ids)
        self._generated = 0
        self._last_step = EngineSignals(total_blocks=pool.num_blocks, block_size=pool.block_size)

    @property
    def has_work(self) -> bool:
        return bool(self._entries)

    @property
    def signals(self) -> EngineSignals:
        """The current state, with the figures of the last step."""
        return replace(
            self._last_step,
            running=len(self._scheduler.running),
            waiting=sum(not one.request.embed for one in self._scheduler.waiting) + len(self._building),
            kv_usage=self._pool.usage,
            preemptions=self._scheduler.preemptions,
            prefix_queries=self._scheduler.prefix_queries,
            prefix_hits=self._scheduler.prefix_hits,
            prompt_tokens=self._scheduler.prompt_tokens,
            generation_tokens=self._generated,
        )

    def install_adapter(self, adapter_id: str, weights: LoraWeights) -> None:
        self._adapters.install(adapter_id, weights, self._adapters_in_use())

    def remove_adapter(self, adapter_id: str) -> None:
        """Its weights are freed after the last request that uses them."""
        self._adapters.remove(adapter_id)
        self._free_adapters()

    def add(self, request: GenerationRequest) -> None:
        """Queue a request that ``check_request`` accepts. Raises RequestedAdapterMissing, and then nothing
        has changed.
        """
        given = request.sampling.seed
        seed = self._seeds.getrandbits(64) if given is None else given
        adapter = None if request.adapter_id is None else self._adapters.version(request.adapter_id)
        sequence = Sequence(request, arrived_at=self._clock(), seed=seed, adapter=adapter)
        sequence.adjustments = adjustments_of(request.sampling, request.prompt_token_ids, self._eos)
        if sequence.adjustments is not None:
            for token in request.partial_token_ids:
                sequence.adjustments.add(token)
        self._entries[request.request_id] = _Entry(sequence, self._tokenizer)
        if request.sampling.structured is None:
            self._scheduler.add(sequence)
        else:
            self._building[sequence] = self._grammars.build(request.sampling.structured)

    def abort(self, request_id: str) -> bool:
        """End a request without an output and free its blocks; false when it is not in flight."""
        entry = self._entries.get(request_id)
        if entry is None:
            return False
        self._drop(entry.sequence)
        return True

    def step(self) -> list[SequenceOutput]:
        ended = self._queue_built() if self._building else []
        started_at = self._clock()
        chunks = self._scheduler.schedule()
        for chunk in chunks:
            if chunk.sequence.first_scheduled_at is None:
                chunk.sequence.first_scheduled_at = started_at
        chunks, result = self._run(chunks)
        outputs = ended + self._update(chunks, result)
        self._last_step = replace(
            self._last_step,
            tokens_scheduled=sum(chunk.length for chunk in chunks),
            steps=self._last_step.steps + 1,
        )
        return outputs

    def check_integrity(self) -> None:
        self._scheduler.check_integrity()

    def _queue_built(self) -> list[SequenceOutput]:
        """Queue the sequences whose grammar is built. A sequence ends here when its grammar is invalid or its
        partial answer is already complete.
        """
        if not (self._scheduler.running or self._scheduler.waiting):
            wait(self._building.values(), GRAMMAR_WAIT_S, FIRST_COMPLETED)
        ended = []
        for sequence, built in [item for item in self._building.items() if item[1].done()]:
            try:
                grammar = built.result()
                sequence.matcher = Matcher(grammar)
                complete = sequence.matcher.resume(self._grammars.partial_text(sequence.request, grammar))
            except InvalidGrammar as error:
                # A cached future keeps the error, and with a traceback the frames of its requests.
                error.__traceback__ = None
                ended.append(self._fail(sequence, error.code, str(error)))
                continue
            if complete:
                self._drop(sequence)
                ended.append(self._output(sequence, "", (), SequenceEnd.STOP))
            else:
                del self._building[sequence]
                self._scheduler.add(sequence)
        return ended

    def _run(self, chunks: list[Chunk]) -> tuple[list[Chunk], StepResult | None]:
        """Run the step; when memory is short, retry with fewer sequences. None: not even one could run."""
        while chunks:
            try:
                return chunks, self._runner.run(chunks)
            except OutOfMemory:
                if len(chunks) == 1:
                    return chunks, None
                chunks = self._scheduler.shed(chunks)
        return chunks, StepResult([], frozenset())

    def _update(self, chunks: list[Chunk], result: StepResult | None) -> list[SequenceOutput]:
        if result is None:
            return [self._fail(chunks[0].sequence, OUT_OF_MEMORY)]
        # A failed chunk does not count as computed: its blocks must not get into the prefix cache.
        self._scheduler.advance([chunk for at, chunk in enumerate(chunks) if at not in result.failed])
        outputs = []
        for index, (chunk, token) in enumerate(zip(chunks, result.tokens, strict=True)):
            if index in result.failed:
                outputs.append(self._fail(chunk.sequence, NAN_OUTPUT))
            elif (vector := result.embeddings.get(index)) is not None:
                self._drop(chunk.sequence)
                outputs.append(self._output(chunk.sequence, "", (), SequenceEnd.STOP, embedding=vector))
            elif token is not None:
                entry = self._entries[chunk.sequence.request.request_id]
                outputs.append(self._append(entry, token, result.logprobs.get(index)))
        return outputs

    def _append(self, entry: _Entry, token: int, logprob: TokenIdLogprob | None = None) -> SequenceOutput:
        """Add a sampled token to its sequence; the output has its text and, if it is the last, the reason."""
        sequence, stops = entry.sequence, entry.stops
        sampling = sequence.request.sampling
        try:
            complete = sequence.matcher is not None and sequence.matcher.accept(token)
        except InvalidGrammar as error:
            return self._fail(sequence, error.code, str(error))
        if sequence.adjustments is not None:
            sequence.adjustments.add(token)
        sequence.token_ids.append(token)
        self._generated += 1

        text, reason, stop_reason = "", None, None  # type: str, SequenceEnd | None, str | int | None
        if token in self._eos and not sampling.ignore_eos:
            reason = SequenceEnd.STOP
        elif token in sampling.stop_token_ids:
            reason, stop_reason = SequenceEnd.STOP, token
        else:
            text = entry.detokenizer.push(token)
            text = stops.push(text) if sequence.num_output > sampling.min_tokens else stops.skip(text)
            if stops.matched is not None:
                reason, stop_reason = SequenceEnd.STOP, stops.matched
            elif complete:
                reason = SequenceEnd.STOP
            elif (
                sequence.num_sampled >= sampling.max_tokens or sequence.num_tokens >= self.info.max_model_len
            ):
                reason = SequenceEnd.LENGTH
        if reason is not None:
            text += stops.flush()
            self._drop(sequence)
        logprobs = () if logprob is None else (logprob,)
        return self._output(sequence, text, (token,), reason, stop_reason=stop_reason, logprobs=logprobs)

    def _fail(self, sequence: Sequence, error: str, detail: str | None = None) -> SequenceOutput:
        self._drop(sequence)
        return self._output(sequence, "", (), SequenceEnd.ERROR, error=error, detail=detail)

    def _drop(self, sequence: Sequence) -> None:
        if self._building.pop(sequence, None) is None:
            self._scheduler.finish(sequence)
        del self._entries[sequence.request.request_id]
        if sequence.adapter is not None:
            self._free_adapters()

    def _free_adapters(self) -> None:
        if self._adapters.has_retired:
            self._adapters.drop_unused(self._adapters_in_use())

    def _adapters_in_use(self) -> set[AdapterVersion | None]:
        return {entry.sequence.adapter for entry in self._entries.values()}

    def _output(
        self,
        sequence: Sequence,
        text: str,
        token_ids: tuple[int, ...],
        reason: SequenceEnd | None,
        *,
        stop_reason: str | int | None = None,
        error: str | None = None,
        detail: str | None = None,
        logprobs: tuple[TokenIdLogprob, ...] = (),
        embedding: bytes = b"",
    ) -> SequenceOutput:
        timed = reason is not None or sequence.num_sampled == 1
        return SequenceOutput(
            request_id=sequence.request.request_id,
            text=text,
            token_ids=token_ids,
            finish_reason=reason,
            prompt_tokens=sequence.num_prompt,
            output_tokens=sequence.num_sampled,
            cached_tokens=sequence.num_cached,
            queue_wait_s=sequence.queue_wait_s if timed else None,
            error=error,
            stop_reason=stop_reason,
            logprobs=logprobs,
            detail=detail,
            embedding=embedding,
        )
