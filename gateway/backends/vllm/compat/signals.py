"""The engine's figures: written after each of its steps, read by admission and by the metrics."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from admission.values import BackendLoad
from gateway.backends.vllm.values import EngineShape, name_of
from observability.events import Distribution, EngineFigures, LoraFigures
from observability.histogram import Buckets

# The buckets of vLLM's own metrics, seconds, so that its dashboards work with ours.
_TTFT_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_REQUEST_BOUNDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip


# Name, help and buckets of the histograms.
_HISTOGRAMS = (
    ("vllm:time_to_first_token_seconds", "From the request's arrival at the engine.", _TTFT_BOUNDS),
    ("vllm:request_queue_time_seconds", "Waiting for the first step, of ended requests.", _REQUEST_BOUNDS),
    (
        "vllm:request_prefill_time_seconds",
        "From the first step to the first token, of ended requests.",
        _REQUEST_BOUNDS,
    ),
)


# Adapters with running and with waiting requests.
_NO_LORAS: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())


class SignalBoard:
    """The engine's report after its last step, bounded by the sequences in flight.

    The engine reports only when it steps. After the abort of the last request it does not step again, and its
    last report would never change.

    ``on_step`` gets the preemptions so far after each step.

    ``step_tokens``: the most tokens of a step; known once the engine has loaded.
    """

    def __init__(self, on_step: Callable[[int], None] = lambda preemptions: None) -> None:
        self._on_step = on_step
        self.step_tokens = sys.maxsize
        # Sequences that the gateway has requested and that have not ended.
        self.in_flight = 0
        self._schedulers: dict[int, tuple[int, int, float]] = {}
        self._loras = _NO_LORAS
        self.forget()

    def forget(self) -> None:
        """Reset the counters: the warm-up is not a request."""
        self.preemptions = 0
        self._prefix_queries = self._prefix_hits = 0
        self._prompt_tokens = self._generation_tokens = 0
        self._loras_used = False
        # Prompt tokens that the last step computed; without a prefix cache those of the prompts it completed.
        self.computed_tokens = 0
        self._kept = [Buckets(bounds) for _, _, bounds in _HISTOGRAMS]

    @contextmanager
    def sequences(self, count: int) -> Iterator[None]:
        """``count`` more sequences are in flight while the block runs."""
        self.in_flight += count
        try:
            yield
        finally:
            self.in_flight -= count

    def scheduled(self, stats: Any, engine: int) -> None:
        """Record vLLM's ``SchedulerStats``; their queries and hits are those since the last ones."""
        prefix, running = stats.prefix_cache_stats, stats.running_lora_adapters
        waiting = stats.waiting_lora_adapters
        self._schedulers[engine] = (
            stats.num_running_reqs,
            stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
            stats.kv_cache_usage,
        )
        if prefix.queries:
            # vLLM counts all tokens of a prompt in its first step, however many steps it takes.
            self.computed_tokens = min(self.step_tokens, max(0, prefix.queries - prefix.hits))
            self._prefix_queries += prefix.queries
            self._prefix_hits += prefix.hits
        self._loras = _NO_LORAS
        if running or waiting:
            self._loras = tuple(map(name_of, running)), tuple(map(name_of, waiting))
            self._loras_used = True
        self._on_step(self.preemptions)

    def generated(self, stats: Any) -> None:
        """Record vLLM's ``IterationStats``."""
        self.preemptions += stats.num_preempted_reqs
        self.computed_tokens = min(self.step_tokens, stats.num_prompt_tokens)
        self._prompt_tokens += stats.num_prompt_tokens
        self._generation_tokens += stats.num_generation_tokens
        ttft, queue, prefill = self._kept
        ttft.observe(*stats.time_to_first_tokens_iter)
        for ended in stats.finished_requests:
            queue.observe(ended.queued_time)
            prefill.observe(ended.prefill_time)

    def decoded(self, tokens: int) -> None:
        """Record tokens of a step that are no answer's first ones."""
        self.computed_tokens = 0
        self._generation_tokens += tokens

    @property
    def reported(self) -> tuple[int, int, float]:
        """Running, waiting and KV usage, as last reported."""
        engines = self._schedulers.values()
        running, waiting = sum(each[0] for each in engines), sum(each[1] for each in engines)
        return running, waiting, max((each[2] for each in engines), default=0.0)

    def load(self, shape: EngineShape) -> BackendLoad:
        running, waiting, kv_usage = self.reported
        running = min(running, self.in_flight)
        return BackendLoad(
            running=running,
            waiting=min(waiting, self.in_flight - running),
            kv_usage=kv_usage if self.in_flight else 0.0,
            total_blocks=shape.total_blocks * shape.engines,
            block_size=shape.block_size,
            max_running=shape.max_num_seqs * shape.engines,
            workers=shape.engines,
        )

    def figures(self, model: str, shape: EngineShape) -> EngineFigures:
        active = self._loras if self.in_flight else _NO_LORAS
        return EngineFigures(
            model_name=model,
            load=self.load(shape),
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            preemptions=self.preemptions,
            loras=LoraFigures(shape.max_loras, *active) if self._loras_used else None,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            distributions=tuple(
                Distribution(name, text, bounds, tuple(kept.counts), kept.sum)
                for (name, text, bounds), kept in zip(_HISTOGRAMS, self._kept, strict=True)
            ),
        )
