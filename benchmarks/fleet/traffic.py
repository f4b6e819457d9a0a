"""Traffic for a fleet of any size: each worker adds a piece of a trace, so the load per worker is the same.

A piece of Azure's trace is a window that starts at a random time. A piece of Mooncake's is a random share of
its conversations, each complete, so that the possible cache hits are the same for every size. Pieces have
prefixes of their own: they share no conversations.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evaluation.simulator.values import Arrival
from evaluation.simulator.workload import WorkloadShape, requests_of
from ops.replay.trace import read_trace

# Prompts of Mooncake's trace are up to 190,000 tokens long; a sixteenth of them fits a 4,096-token context.
MOONCAKE_SCALE = 1 / 16
# Larger than any id of a trace, so that two pieces never have a prefix in common.
ID_STRIDE = 1 << 24


@dataclass(frozen=True, slots=True)
class Source:
    """A trace's requests at its own pace, and the tokens of one prefix unit (0: a trace without prefixes)."""

    name: str
    requests: Sequence[Arrival]
    unit_tokens: int

    @property
    def span_s(self) -> float:
        """Return the seconds from the first to the last request."""
        return self.requests[-1].at - self.requests[0].at


def read_source(name: str, path: Path, scale: float) -> Source:
    """Read a trace; its prompt lengths are multiplied by ``scale``."""
    trace = read_trace(path)
    return Source(
        name, requests_of(trace, WorkloadShape(prompt_scale=scale)), round(trace.block_tokens * scale)
    )


def traffic(source: Source, workers: int, rate: float, span_s: float, draw: random.Random) -> list[Arrival]:
    """Return requests for ``workers`` workers, sorted by time.

    Args:
        rate: average number of requests per second and worker.
        span_s: seconds over which they arrive.
    """
    piece = _conversations if source.unit_tokens else _window
    requests: list[Arrival] = []
    for number in range(workers):
        shift = (number + 1) * ID_STRIDE
        part = piece(source, rate * span_s / len(source.requests), span_s, draw)
        requests += [replace(one, units=tuple([unit + shift for unit in one.units])) for one in part]
    requests.sort(key=lambda one: one.at)
    return [replace(one, number=number) for number, one in enumerate(requests)]


def _window(source: Source, share: float, span_s: float, draw: random.Random) -> list[Arrival]:
    """Return a ``share`` of the trace from a random time on, wrapped around and scaled to ``span_s``."""
    whole_s, first = source.span_s, source.requests[0].at
    start = draw.random() * whole_s
    found = []
    for one in source.requests:
        at = ((one.at - first - start) % whole_s) / (whole_s * share)
        if at < 1.0:
            found.append(replace(one, at=at * span_s))
    return found


def _conversations(source: Source, share: float, span_s: float, draw: random.Random) -> list[Arrival]:
    """Return each conversation with probability ``share``; the whole trace is compressed into ``span_s``."""
    first, chosen = source.requests[0].at, defaultdict[int, bool](lambda: draw.random() < share)
    return [
        replace(one, at=(one.at - first) / source.span_s * span_s)
        for one in source.requests
        if chosen[one.units[0] if one.units else -one.number - 1]
    ]


def ideal_hits(requests: Sequence[Arrival], unit_tokens: int) -> int:
    """Return the prompt tokens that a single cache of unlimited size, filled at once, would have found."""
    seen: set[int] = set()
    found = 0
    for one in requests:
        known = 0
        for unit in one.units:
            if unit not in seen:
                break
            known += 1
        # A prompt is never found completely: one token must be computed to have logits to sample from.
        found += min(known * unit_tokens, one.prompt - 1)
        seen.update(one.units)
    return found
