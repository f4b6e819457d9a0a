"""How much of a multi-turn trace's prompts the prefix cache finds, against the ideal, as the pool shrinks.

    python -m benchmarks.prefix_cache
    python -m benchmarks.prefix_cache --trace PATH --plot docs/prefix-cache.png --json
    python -m benchmarks.prefix_cache --engine models/demo

A row of a Mooncake trace lists the ids of its prompt's blocks of 512 tokens; equal ids at the beginning mean
an equal prefix. All lengths are scaled by 1/64: such a block becomes 8 tokens, made from its id, which are
one block of the engine. The ideal counts the leading ids of each prompt that an earlier row has had, as if
all blocks were kept for ever and no token of a prompt had to be computed.

The curve uses the engine's scheduler, block pool and prefix cache without a model: all decisions are real,
nothing is computed, and a step takes ``--step-ms`` of a virtual clock by which the requests arrive.
``--engine`` runs the whole engine on a model with the same arrivals, with and without the cache, and prints
the time.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console
from rich.table import Table

from engine.block_pool import BlockPool
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.values import EngineConfig, EngineSignals, GenerationRequest, SamplingParams, SequenceOutput
from ops.replay.trace import MOONCAKE_BLOCK_TOKENS, Trace, read_trace

REPOSITORY = Path(__file__).resolve().parent.parent
TRACE = REPOSITORY / "benchmarks" / "data" / "mooncake_synthetic_500.jsonl"
BLOCK_SIZE = 8
SCALE = BLOCK_SIZE / MOONCAKE_BLOCK_TOKENS
# Ids of text tokens: every model's vocabulary has them, and no special token is among them.
TOKEN_IDS = range(300, 1000)
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 128, 1024


@dataclass(frozen=True, slots=True)
class Point:
    """The figures of one pool size. Rates are shares of all prompt tokens, 0 to 1."""

    pool_blocks: int
    prompt_tokens: int
    found_tokens: int
    hit_rate: float
    of_ideal: float
    preemptions: int
    steps: int
    elapsed_s: float


class Engine(Protocol):
    """What a trace is replayed to: the whole engine, or its scheduler alone."""

    @property
    def has_work(self) -> bool:
        """Return whether the engine has unfinished requests."""

    @property
    def signals(self) -> EngineSignals:
        """Counters since its start."""

    def add(self, request: GenerationRequest) -> None:
        """Queues a request."""

    def step(self) -> list[SequenceOutput]:
        """Computes one batch."""


class Clock:
    """A clock of virtual seconds."""

    now_s = 0.0

    def __call__(self) -> float:
        """Return the virtual time."""
        return self.now_s


class DryEngine:
    """The engine's decisions without a model: every answer has its maximum length, of one repeated token."""

    def __init__(self, num_blocks: int, clock: Clock) -> None:
        self._clock = clock
        self._pool = BlockPool(num_blocks, BLOCK_SIZE)
        self._scheduler = Scheduler(
            self._pool, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS
        )
        self._steps = 0

    @property
    def has_work(self) -> bool:
        """See ``Engine``."""
        return bool(self._scheduler.running or self._scheduler.waiting)

    @property
    def signals(self) -> EngineSignals:
        """See ``Engine``."""
        return EngineSignals(
            preemptions=self._scheduler.preemptions,
            prefix_queries=self._scheduler.prefix_queries,
            prefix_hits=self._scheduler.prefix_hits,
            steps=self._steps,
        )

    def add(self, request: GenerationRequest) -> None:
        """See ``Engine``."""
        self._scheduler.add(Sequence(request, arrived_at=self._clock(), seed=0))

    def step(self) -> list[SequenceOutput]:
        """See ``Engine``; there is no output."""
        chunks = self._scheduler.schedule()
        answering = [chunk.sequence for chunk in chunks if chunk.is_last]
        self._scheduler.advance(chunks)
        for sequence in answering:
            sequence.token_ids.append(TOKEN_IDS[0])
            if sequence.num_output == sequence.request.sampling.max_tokens:
                self._scheduler.finish(sequence)
        self._steps += 1
        return []


def requests_of(trace: Trace) -> list[tuple[float, GenerationRequest]]:
    """The requests with their times of arrival, in seconds of the trace."""
    return [
        (
            row.at_s,
            GenerationRequest(
                str(number),
                prompt_of(row.block_ids, scaled(row.input_tokens)),
                SamplingParams(max_tokens=scaled(row.output_tokens), temperature=0.0, ignore_eos=True),
            ),
        )
        for number, row in enumerate(trace.arrivals)
    ]


def scaled(tokens: int) -> int:
    """Return a length scaled for the replay."""
    return max(1, round(tokens * SCALE))


def prompt_of(block_ids: Seq[int], length: int) -> tuple[int, ...]:
    """Tokens in which equal ids are equal blocks, and different ones different."""
    tokens: list[int] = []
    for block_id in block_ids:
        high, low = divmod(block_id, len(TOKEN_IDS))
        rng = random.Random(block_id)
        tokens += TOKEN_IDS[high], TOKEN_IDS[low], *rng.choices(TOKEN_IDS, k=BLOCK_SIZE - 2)
    return tuple(tokens[:length])


def ideal_tokens(trace: Trace) -> tuple[int, int]:
    """Return the prompt tokens that an ideal cache finds, and the number of blocks, from the trace's ids."""
    seen: set[int] = set()
    found = 0
    for row in trace.arrivals:
        leading = 0
        while leading < len(row.block_ids) and row.block_ids[leading] in seen:
            leading += 1
        found += min(leading * BLOCK_SIZE, scaled(row.input_tokens))
        seen.update(row.block_ids)
    return found, len(seen)


def replay(
    engine: Engine, clock: Clock, requests: Seq[tuple[float, GenerationRequest]], speed: float, step_s: float
) -> float:
    """Send each request at its time and step while there is work; return the elapsed real seconds."""
    started_at = time.perf_counter()
    pending = list(reversed(requests))
    while pending or engine.has_work:
        if not engine.has_work:
            clock.now_s = max(clock.now_s, pending[-1][0] / speed)
        while pending and pending[-1][0] / speed <= clock.now_s:
            engine.add(pending.pop()[1])
        engine.step()
        clock.now_s += step_s
    return time.perf_counter() - started_at


def point(engine: Engine, pool_blocks: int, prompt_tokens: int, ideal: int, elapsed_s: float) -> Point:
    """Return the figures that ``engine`` counted during its replay."""
    signals = engine.signals
    return Point(
        pool_blocks=pool_blocks,
        prompt_tokens=prompt_tokens,
        found_tokens=signals.prefix_hits,
        hit_rate=signals.prefix_hits / prompt_tokens,
        of_ideal=signals.prefix_hits / ideal,
        preemptions=signals.preemptions,
        steps=signals.steps,
        elapsed_s=elapsed_s,
    )


def pool_sizes(requests: Seq[tuple[float, GenerationRequest]], blocks: int) -> list[int]:
    """Powers of two, from the first that holds the longest request to one that holds everything."""
    longest = max(len(one.prompt_token_ids) + one.sampling.max_tokens for _, one in requests)
    sizes = [1 << (longest // BLOCK_SIZE).bit_length()]
    while sizes[-1] < blocks:
        sizes.append(2 * sizes[-1])
    return sizes


def print_table(title: str, points: Seq[Point], blocks: int) -> None:
    """Print the curve as a table."""
    table = Table(title=title)
    for heading in ("pool, blocks", "of all blocks", "hit rate", "of ideal", "preemptions", "steps", "s"):
        table.add_column(heading, justify="right")
    for one in points:
        table.add_row(
            f"{one.pool_blocks:,}",
            f"{one.pool_blocks / blocks:.1%}",
            f"{one.hit_rate:.2%}",
            f"{one.of_ideal:.2%}",
            f"{one.preemptions:,}",
            f"{one.steps:,}",
            f"{one.elapsed_s:.1f}",
        )
    Console(width=110).print(table)


def draw(path: Path, points: Seq[Point], ideal_rate: float, blocks: int, subtitle: str) -> None:
    """Writes the curve as a PNG."""
    # Without pyplot, which keeps global state and looks for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from ops.replay.plot import BLUE, FAINT, GREEN, GRID, INK

    figure = Figure(figsize=(9, 5), dpi=130, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    sizes, rates = [one.pool_blocks for one in points], [100 * one.hit_rate for one in points]
    axes.axhline(100 * ideal_rate, color=GREEN, linewidth=1.4, linestyle=(0, (5, 3)))
    axes.annotate(
        f"ideal {ideal_rate:.1%}", (sizes[0], 100 * ideal_rate), (0, 5), textcoords="offset points",
        color=GREEN, fontsize=9.5,
    )  # fmt: skip
    axes.axvline(blocks, color=FAINT, linewidth=1, linestyle=":")
    axes.annotate(f"all {blocks:,} blocks of the trace ", (blocks, 2), ha="right", color=FAINT, fontsize=9.5)
    axes.plot(sizes, rates, color=BLUE, linewidth=2.2, marker="o", markersize=5)
    for size, rate in zip(sizes, rates, strict=True):
        axes.annotate(
            f"{rate:.1f}", (size, rate), (7, -11), textcoords="offset points", color=INK, fontsize=8.5,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.set_ylim(0, max(10.0, 115 * ideal_rate))
    axes.set_xlabel(f"pool, in blocks of {BLOCK_SIZE} tokens", color=INK)
    axes.set_ylabel("prompt tokens found in the cache, %", color=INK)
    figure.suptitle(
        "Prefix cache: hit rate by pool size", x=0.012, ha="left", fontsize=14, weight="bold", color=INK
    )
    axes.set_title(subtitle, loc="left", fontsize=9.5, color=FAINT)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, labelsize=8.5, length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    figure.savefig(path, format="png")


def run_engine(model: Path, pool_blocks: int, caching: bool, clock: Clock) -> Engine:
    """Build the whole engine on a model."""
    from engine.build import build_engine

    config = EngineConfig(
        str(model),
        block_size=BLOCK_SIZE,
        num_blocks=pool_blocks,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        enable_prefix_caching=caching,
        seed=0,
    )
    return build_engine(config, clock)


def main(
    trace: Annotated[Path, typer.Option(help="a Mooncake trace")] = TRACE,
    limit: Annotated[int | None, typer.Option(help="rows to replay; all when not given")] = None,
    speed: Annotated[float, typer.Option(help="divides the times of the trace")] = 10.0,
    step_ms: Annotated[float, typer.Option(help="what a step takes on the virtual clock")] = 20.0,
    engine: Annotated[Path | None, typer.Option(help="a model to run the whole engine on, too")] = None,
    plot: Annotated[Path | None, typer.Option(help="write the curve to this PNG")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Replays the trace at every pool size, prints the curve."""
    read = read_trace(trace, limit=limit)
    requests = requests_of(read)
    prompt_tokens = sum(len(request.prompt_token_ids) for _, request in requests)
    ideal, blocks = ideal_tokens(read)
    points, engine_points = [], {}
    for size in pool_sizes(requests, blocks):
        clock = Clock()
        dry = DryEngine(size, clock)
        points.append(
            point(dry, size, prompt_tokens, ideal, replay(dry, clock, requests, speed, step_ms / 1e3))
        )
    if engine is not None:
        for name, caching in (("with the cache", True), ("without it", False)):
            clock = Clock()
            whole = run_engine(engine, points[-1].pool_blocks, caching, clock)
            elapsed_s = replay(whole, clock, requests, speed, step_ms / 1e3)
            engine_points[name] = point(whole, points[-1].pool_blocks, prompt_tokens, ideal, elapsed_s)

    about = (
        f"{len(requests):,} rows of {trace.name}, lengths x 1/{1 / SCALE:.0f} ({prompt_tokens:,} prompt "
        f"tokens), times / {speed:g}, {step_ms:g} ms a step"
    )
    if plot is not None:
        draw(plot, points, ideal / prompt_tokens, blocks, about)
    if as_json:
        facts = {"about": about, "ideal": ideal / prompt_tokens, "blocks": blocks}
        curves = {
            "curve": [asdict(one) for one in points],
            "engine": {n: asdict(p) for n, p in engine_points.items()},
        }
        print(json.dumps({**facts, **curves}))
        return
    print_table(f"{about}; ideal {ideal / prompt_tokens:.2%}", points, blocks)
    for name, one in engine_points.items():
        print_table(f"the whole engine {name}, {engine}", [one], blocks)


if __name__ == "__main__":
    typer.run(main)
