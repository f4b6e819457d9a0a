"""Traces as the simulator's requests: tenants, priorities, lengths and arrival times."""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from evaluation.simulator.values import Arrival
from ops.replay.trace import Trace


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    """How rows of a trace become requests.

    Args:
        prompt_scale: multiplies prompt lengths.
        max_prompt, max_output: longest prompt and output in tokens; longer ones are cut.
        tenants, zipf: number of tenants; tenant k is drawn with a weight of k to the power ``-zipf``.
        high, low: shares of priority 1 and -1.
        seed: of tenants and priorities.
    """

    prompt_scale: float = 1.0
    max_prompt: int = 3400
    max_output: int = 696
    tenants: int = 20
    zipf: float = 1.0
    high: float = 0.10
    low: float = 0.20
    seed: int = 1


def requests_of(trace: Trace, shape: WorkloadShape) -> list[Arrival]:
    """All rows of a trace at its own pace, with tenants and priorities drawn by the seed."""
    draw = random.Random(shape.seed)
    weights = list(accumulate(rank**-shape.zipf for rank in range(1, shape.tenants + 1)))
    unit = round(trace.block_tokens * shape.prompt_scale)
    requests = []
    for number, row in enumerate(trace.arrivals):
        prompt = min(shape.max_prompt, max(1, round(row.input_tokens * shape.prompt_scale)))
        tenant = bisect(weights, draw.random() * weights[-1])
        urgency = draw.random()
        requests.append(
            Arrival(
                number,
                row.at_s,
                prompt,
                min(shape.max_output, row.output_tokens),
                shape.max_output,
                tenant=f"t{tenant + 1}",
                priority=1 if urgency < shape.high else -1 if urgency >= 1.0 - shape.low else 0,
                units=row.block_ids[: prompt // unit] if unit else (),
            )
        )
    return requests


def halves(requests: Sequence[Arrival]) -> tuple[list[Arrival], list[Arrival]]:
    """The first half, to tune on, and the second, to report on; each begins at 0 s."""
    middle = len(requests) // 2
    return paced(requests[:middle], 1.0), paced(requests[middle:], 1.0)


def paced(requests: Sequence[Arrival], speed: float) -> list[Arrival]:
    """The same requests, arriving ``speed`` times as fast, from 0 s on."""
    if not requests:
        return []
    start = requests[0].at
    return [
        Arrival(
            one.number,
            (one.at - start) / speed,
            one.prompt,
            one.output,
            one.max_tokens,
            one.tenant,
            one.priority,
            one.units,
        )
        for one in requests
    ]


def rate_of(requests: Sequence[Arrival]) -> float:
    """Return the arrivals per second."""
    span_s = requests[-1].at - requests[0].at if requests else 0.0
    return len(requests) / span_s if span_s > 0 else math.inf
