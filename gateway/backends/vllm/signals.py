"""The engine's figures, fed after each of its steps and read by admission and by a scrape."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from admission.values import BackendLoad
from gateway.backends.vllm.values import EngineShape
from observability.events import Distribution, EngineFigures, LoraFigures

# vLLM's own steps of these series, so that dashboards made for it read ours; seconds.
_TTFT_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_REQUEST_BOUNDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip


class _Histogram:
    """Counts by bucket; the last one has no upper bound."""

    __slots__ = ("bounds", "counts", "name", "text", "total")

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.text = text
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def shown(self) -> Distribution:
        return Distribution(self.name, self.text, self.bounds, tuple(self.counts), self.total)


class SignalBoard:
    """What the engine reported after its last step, corrected by what the gateway knows.

    The engine reports only when it steps. When the last request is aborted it does not step again, so its
    last report would never change; the number of sequences that the gateway has in flight bounds it.
    """

    def __init__(self) -> None:
        self._in_flight = 0
        self._schedulers: dict[int, tuple[int, int, float]] = {}
        self._running_loras: tuple[str, ...] = ()
        self._waiting_loras: tuple[str, ...] = ()
        self.forget()

    def forget(self) -> None:
        """Reset the counters: the warm-up is not a request."""
        self.preemptions = 0
        self._prefix_queries = self._prefix_hits = 0
        self._prompt_tokens = self._generation_tokens = 0
        self._loras_used = False
        self._ttft = _Histogram(
            "vllm:time_to_first_token_seconds", "From the request's arrival at the engine.", _TTFT_BOUNDS
        )
        self._queue = _Histogram(
            "vllm:request_queue_time_seconds",
            "Waiting for the first step, of ended requests.",
            _REQUEST_BOUNDS,
        )
        self._prefill = _Histogram(
            "vllm:request_prefill_time_seconds",
            "From the first step to the first token, of ended requests.",
            _REQUEST_BOUNDS,
        )

    @contextmanager
    def sequences(self, count: int) -> Iterator[None]:
        """So many sequences are in flight while the block runs."""
        self._in_flight += count
        try:
            yield
        finally:
            self._in_flight -= count

    @property
    def in_flight(self) -> int:
        """Sequences that the gateway has asked for and not had back."""
        return self._in_flight

    def scheduled(
        self,
        engine: int,
        *,
        running: int,
        waiting: int,
        kv_usage: float,
        prefix_queries: int,
        prefix_hits: int,
        running_loras: Iterable[str] = (),
        waiting_loras: Iterable[str] = (),
    ) -> None:
        """Take what one engine's scheduler reported; queries and hits are those since its last report."""
        self._schedulers[engine] = running, waiting, kv_usage
        self._prefix_queries += prefix_queries
        self._prefix_hits += prefix_hits
        self._running_loras = tuple(running_loras)
        self._waiting_loras = tuple(waiting_loras)
        if self._running_loras or self._waiting_loras:
            self._loras_used = True

    def generated(
        self,
        *,
        preemptions: int,
        prompt_tokens: int,
        generation_tokens: int,
        first_tokens_s: Iterable[float],
        ended_s: Iterable[tuple[float, float]],
    ) -> None:
        """Take what one step did: times to first tokens, and of the ended requests queue and prefill time."""
        self.preemptions += preemptions
        self._prompt_tokens += prompt_tokens
        self._generation_tokens += generation_tokens
        for value in first_tokens_s:
            self._ttft.observe(value)
        for queue_s, prefill_s in ended_s:
            self._queue.observe(queue_s)
            self._prefill.observe(prefill_s)

    @property
    def reported(self) -> tuple[int, int, float]:
        """Running, waiting and KV usage as the engine reported them last."""
        engines = self._schedulers.values()
        running, waiting = sum(each[0] for each in engines), sum(each[1] for each in engines)
        return running, waiting, max((each[2] for each in engines), default=0.0)

    def _now(self) -> tuple[int, int, float]:
        running, waiting, kv_usage = self.reported
        running = min(running, self._in_flight)
        waiting = min(waiting, self._in_flight - running)
        return running, waiting, kv_usage if self._in_flight else 0.0

    def load(self, shape: EngineShape) -> BackendLoad:
        """In admission's terms."""
        running, waiting, kv_usage = self._now()
        return BackendLoad(
            running=running,
            waiting=waiting,
            kv_usage=kv_usage,
            total_blocks=shape.total_blocks,
            block_size=shape.block_size,
            max_running=shape.max_num_seqs,
        )

    def figures(self, model: str, shape: EngineShape) -> EngineFigures:
        """What a scrape shows."""
        running, waiting, kv_usage = self._now()
        busy = self._in_flight > 0
        loras = (
            LoraFigures(
                shape.max_loras,
                self._running_loras if busy else (),
                self._waiting_loras if busy else (),
            )
            if self._loras_used
            else None
        )
        return EngineFigures(
            model_name=model,
            running=running,
            waiting=waiting,
            kv_usage=kv_usage,
            block_size=shape.block_size,
            total_blocks=shape.total_blocks,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            preemptions=self.preemptions,
            loras=loras,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            distributions=(self._ttft.shown(), self._queue.shown(), self._prefill.shown()),
        )
