"""What Ray Serve's request router costs a call: ``python -m benchmarks.ray_router``.

The production router, :class:`ops.ray.router.PrefixRouter`, runs without a cluster: replicas are names and
figures. The CPU time between Serve's question and the router's answer is measured, including the note of
where the call went. Serve's own work, the network and the engines are left out. Calls are turns of
conversations with a common system prompt, ten open on each replica. Also measured are the scan of all
replicas, which a router of more than 32 makes at most four times a second, and a change of their number.
"""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from ray.serve._private.common import DeploymentID, ReplicaID
from rich.console import Console
from rich.table import Table

from ops.ray.router import GENERATE, PrefixRouter
from ops.ray.wire import RouterHint, encode

STABLE_BLOCKS = 8
TURN_BLOCKS = 2
MOST_TURNS = 12
OPEN_CONVERSATIONS = 10
# Average number of calls in flight on a replica.
IN_HAND = 4


@dataclass(eq=False)
class Replica:
    """A running replica as the router sees it."""

    replica_id: ReplicaID
    routing_stats: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Context:
    """A call's routing context as the router sees it."""

    should_backoff: bool = False


@dataclass
class Metadata:
    """A call's metadata as the router sees it."""

    call_method: str = GENERATE


@dataclass
class Call:
    """A pending call as the router sees it."""

    args: list[Any]
    metadata: Metadata = field(default_factory=Metadata)
    routing_context: Context = field(default_factory=Context)


class Router(PrefixRouter):
    """The production router with fixed replicas, without Serve's own part."""

    def __init__(self, count: int) -> None:
        self._lengths: dict[ReplicaID, int] = {}
        self.initialize_state()
        replicas = [
            Replica(
                ReplicaID(f"r{number}", DeploymentID("Engine", "sluice")), {"ready": True, "kv_usage": 0.4}
            )
            for number in range(count)
        ]
        self._replicas: Any = {replica.replica_id: replica for replica in replicas}
        self._by_name: Any = {replica.replica_id.unique_id: replica for replica in replicas}
        self._fleet.resize(list(self._by_name))

    @property
    def replica_queue_len_cache(self) -> Any:
        """Return the queue lengths as Serve stores them."""
        return self._lengths


async def cost_us(count: int, calls: int, seed: int) -> list[float]:
    """Return the CPU microseconds of each call, sorted."""
    draw, router, took = random.Random(seed), Router(count), []
    lengths, candidates = router._lengths, list(router._replicas.values())
    in_hand: list[ReplicaID] = []
    conversations = [
        [hash((7, block)) for block in range(STABLE_BLOCKS)] for _ in range(OPEN_CONVERSATIONS * count)
    ]
    for _ in range(calls + IN_HAND * count):
        chain = conversations[draw.randrange(len(conversations))]
        if len(chain) > STABLE_BLOCKS + TURN_BLOCKS * MOST_TURNS:
            del chain[STABLE_BLOCKS:]
        chain.extend(draw.getrandbits(62) for _ in range(TURN_BLOCKS))
        call: Any = Call([encode(RouterHint(tuple(chain), STABLE_BLOCKS))])
        began = time.thread_time_ns()
        ranks = await router.choose_replicas(candidates, call)
        chosen = ranks[0][0].replica_id
        router.on_request_routed(call, chosen, None)
        spent_us = (time.thread_time_ns() - began) / 1000
        lengths[chosen] = lengths.get(chosen, 0) + 1
        in_hand.append(chosen)
        if len(in_hand) > IN_HAND * count:
            lengths[in_hand.pop(draw.randrange(len(in_hand)))] -= 1
            took.append(spent_us)
    return sorted(took)


def looks_us(count: int) -> tuple[float, float]:
    """Return the CPU microseconds of a scan of all replicas, and of adding one replica; the best of five."""
    look, grow = [], []
    for _ in range(5):
        router = Router(count)
        began = time.thread_time_ns()
        router._fleet._share()
        looked = time.thread_time_ns()
        router._fleet.resize([*router._by_name, "one-more"])
        grow.append((time.thread_time_ns() - looked) / 1000)
        look.append((looked - began) / 1000)
    return min(look), min(grow)


def main(
    sizes: Annotated[str, typer.Option(help="Numbers of replicas.")] = "2,8,32,100,300,1000",
    calls: Annotated[int, typer.Option(min=100, help="Measured calls of each size.")] = 3_000,
    seed: int = 1,
) -> None:
    """Print CPU microseconds a call."""
    table = Table("replicas", "p50 µs", "p99 µs", "mean µs", "look at all µs", "one more ms")
    gc.disable()  # as in a gateway, whose heap is frozen
    for count in map(int, sizes.split(",")):
        took = asyncio.run(cost_us(count, calls, seed))
        figures = (statistics.median(took), took[int(0.99 * (len(took) - 1))], statistics.fmean(took))
        look_us, grow_us = looks_us(count)
        shown = (f"{figure:,.0f}" for figure in (*figures, look_us))
        table.add_row(f"{count:,}", *shown, f"{grow_us / 1000:.1f}")
        gc.collect()
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
