"""The engine: requests in, one step at a time, outputs out. No asyncio, no threads, no sockets."""

import random
from collections.abc import Callable
from dataclasses import replace

from tokenizers import Tokenizer

from engine.block_pool import BlockPool
from engine.errors import DuplicateRequest, EngineBusy
from engine.limits import check_request
from engine.runner import OutOfMemory, Runner, StepResult
from engine.scheduler import Chunk, Scheduler
from engine.sequence import Sequence
from engine.text import Detokenizer, StopStrings
from engine.values import EngineInfo, EngineSignals, FinishReason, GenerationRequest, SequenceOutput

NAN_OUTPUT = "nan_output"
OUT_OF_MEMORY = "out_of_memory"


class _Entry:
    """A sequence with the state of its text."""

    __slots__ = ("detokenizer", "sequence", "stops")

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        self.sequence = sequence
        self.detokenizer = Detokenizer(tokenizer)
        self.stops = StopStrings(sequence.request.sampling.stop)


class Engine:
    """Continuous batching: every step serves whatever requests there are.

    ``clock`` gives seconds; ``seeds`` draws a seed for each request that has none.
    """

    def __init__(
        self,
        *,
        info: EngineInfo,
        pool: BlockPool,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer,
        clock: Callable[[], float],
        seeds: random.Random,
    ) -> None:
        self.info = info
        self._pool = pool
        self._scheduler = scheduler
        self._runner = runner
        self._tokenizer = tokenizer
        self._clock = clock
        self._seeds = seeds
        self._entries: dict[str, _Entry] = {}
        self._eos = frozenset(info.eos_token_ids)
        self._last_step = EngineSignals(total_blocks=pool.num_blocks, block_size=pool.block_size)

    @property
    def has_work(self) -> bool:
        """True while a request is in the engine."""
        return bool(self._entries)

    @property
    def signals(self) -> EngineSignals:
        """The state now, and the figures of the last step."""
        return replace(
            self._last_step,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            free_blocks=self._pool.num_free,
            kv_usage=self._pool.usage,
            preemptions=self._scheduler.preemptions,
        )

    def add(self, request: GenerationRequest) -> None:
        """Queues a request. Raises a RequestRefused, and then nothing has changed."""
        if request.request_id in self._entries:
            raise DuplicateRequest(f"request {request.request_id!r} is in flight")
        if len(self._entries) >= self.info.max_requests:
            raise EngineBusy(f"{len(self._entries)} requests are in flight")
        check_request(request, self.info)
        given = request.sampling.seed
        seed = self._seeds.getrandbits(64) if given is None else given
        sequence = Sequence(request, arrived_at=self._clock(), seed=seed)
        self._entries[request.request_id] = _Entry(sequence, self._tokenizer)
        self._scheduler.add(sequence)

    def abort(self, request_id: str) -> bool:
        """Ends a request without an output, its blocks free at once. False when it is not in flight."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return False
        self._scheduler.finish(entry.sequence)
        return True

    def step(self) -> list[SequenceOutput]:
        """Computes one batch and returns what it brought."""
        started_at = self._clock()
        chunks = self._scheduler.schedule()
        for chunk in chunks:
            if chunk.sequence.first_scheduled_at is None:
                chunk.sequence.first_scheduled_at = started_at
        chunks, result = self._run(chunks)
        outputs = self._update(chunks, result)
        self._last_step = replace(
            self._last_step,
            step_s=self._clock() - started_at,
            tokens_scheduled=sum(chunk.length for chunk in chunks),
            steps=self._last_step.steps + 1,
        )
        return outputs

    def check_integrity(self) -> None:
        """Raises AssertionError unless all blocks and rows are accounted for."""
        self._scheduler.check_integrity()

    def _run(self, chunks: list[Chunk]) -> tuple[list[Chunk], StepResult | None]:
        """Runs the step; when memory is short, with ever fewer sequences. None: not even one could run."""
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
        now = self._clock()
        self._scheduler.advance(chunks)
        outputs = []
        for index, (chunk, token) in enumerate(zip(chunks, result.tokens, strict=True)):
            if index in result.failed:
                outputs.append(self._fail(chunk.sequence, NAN_OUTPUT))
            elif token is not None:
                outputs.append(self._append(self._entries[chunk.sequence.request.request_id], token, now))
        return outputs

    def _append(self, entry: _Entry, token: int, now: float) -> SequenceOutput:
        """Adds a sampled token to its sequence: its text, and whether it is the last one."""
        sequence, stops = entry.sequence, entry.stops
        sampling = sequence.request.sampling
        sequence.token_ids.append(token)
        if sequence.first_token_at is None:
            sequence.first_token_at = now

        text, reason, stop_reason = "", None, None  # type: str, FinishReason | None, str | int | None
        if token in self._eos and not sampling.ignore_eos:
            reason = FinishReason.STOP
        elif token in sampling.stop_token_ids:
            reason, stop_reason = FinishReason.STOP, token
        else:
            text = stops.push(entry.detokenizer.push(token))
            if stops.matched is not None:
                reason, stop_reason = FinishReason.STOP, stops.matched
            elif sequence.num_output >= sampling.max_tokens or sequence.num_tokens >= self.info.max_model_len:
                reason = FinishReason.LENGTH
        if reason is not None:
            text += stops.flush()
            self._drop(sequence)
        return self._output(sequence, text, (token,), reason, stop_reason=stop_reason)

    def _fail(self, sequence: Sequence, error: str) -> SequenceOutput:
        self._drop(sequence)
        return self._output(sequence, "", (), FinishReason.ERROR, error=error)

    def _drop(self, sequence: Sequence) -> None:
        self._scheduler.finish(sequence)
        del self._entries[sequence.request.request_id]

    def _output(
        self,
        sequence: Sequence,
        text: str,
        token_ids: tuple[int, ...],
        reason: FinishReason | None,
        *,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> SequenceOutput:
        timed = reason is not None or sequence.num_output == 1
        return SequenceOutput(
            request_id=sequence.request.request_id,
            text=text,
            token_ids=token_ids,
            finish_reason=reason,
            prompt_tokens=sequence.num_prompt,
            output_tokens=sequence.num_output,
            cached_tokens=sequence.num_cached,
            queue_wait_s=sequence.queue_wait_s if timed else None,
            prefill_s=sequence.prefill_s if timed else None,
            error=error,
            stop_reason=stop_reason,
        )
