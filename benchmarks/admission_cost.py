"""What an admission decision costs: a request is offered, handed on and released at a gate with 1,000 queued.

Run with ``python -m benchmarks.admission_cost``; the limit is 50 µs at the 99th percentile for each decision.
One pump of the queue makes several decisions: one for each request that it hands on, and one that holds the
next request. Both CPU time of this thread, which other work on the machine changes little, and wall time are
shown. ``--refused N`` instead measures how much memory N refused requests leave behind.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import time
from collections.abc import Sequence

from msgspec import structs
from rich.console import Console
from rich.table import Table

from admission.events import SlotOutcome
from admission.gate import BackendGate
from admission.ticket import AdmissionTicket, TicketState
from admission.values import AdmissionLimits, BackendLoad, Demand

TENANTS = 20
BAR_US = 50.0


def clocks() -> tuple[int, int]:
    """Return this thread's CPU time and the wall time, in nanoseconds."""
    return time.thread_time_ns(), time.perf_counter_ns()


def measure(queued: int, running: int, rounds: int, *, memory: bool) -> dict[str, list[tuple[float, float]]]:
    """Return the CPU and wall microseconds of each of ``rounds`` turnovers, by part.

    With ``memory`` it is the KV pool that holds the next request, so that each pump makes a forecast.
    """
    draw, now = random.Random(1), 0.0
    limits = AdmissionLimits(
        max_queue=2 * queued,
        max_wait_s=1e9,
        rungs=(),
        max_queue_tokens=1 << 40,
        max_prefill_tokens=1 << 40,
        tpot_slo_s=60.0,  # so that the pace is tracked and never judged too slow
    )
    gate = BackendGate(limits, random=draw)
    pool = running * 40 if memory else running * 1000
    load = BackendLoad(
        0, 0, 0.0, total_blocks=pool, block_size=16, max_running=2 * running if memory else running
    )
    gate.report(load, now)
    demand = Demand("local", "", 0, 0, 300, 0.0, produced=lambda: 50)

    def ask(number: int) -> Demand:
        return structs.replace(
            demand, tenant=f"t{number % TENANTS}", priority=number % 3 - 1, input_tokens=200 + number % 300
        )

    for number in range(queued + running):
        gate.offer(ask(number), now)
        gate.pump(now)
    going = list(gate.work.tickets.values())
    spent: dict[str, list[tuple[float, float]]] = {"offer": [], "hand on": [], "look": [], "release": []}
    for number in range(rounds):
        now += 0.01
        gate.report(structs.replace(load, running=gate.in_flight), now)
        ticket = going.pop(draw.randrange(len(going)))
        arrival = ask(number)
        begun = clocks()
        gate.first_token(ticket, now, 100)
        gate.release(ticket, SlotOutcome.SUCCEEDED, now, output_tokens=50 + number % 200)
        released = clocks()
        offered = gate.offer(arrival, now)
        taken = clocks()
        handed_on = gate.pump(now)
        done = clocks()
        going += handed_on
        assert isinstance(offered, AdmissionTicket), offered
        if gate.queued > queued:  # with memory, some turnovers hand on no request
            surplus = next(t for t in gate.tickets.values() if t.state is TicketState.WAITING)
            gate.release(surplus, SlotOutcome.IGNORED, now, output_tokens=0)
        for part, start, end in (
            ("release", begun, released), ("offer", released, taken), ("look", taken, done),
        ):  # fmt: skip
            spent[part].append(((end[0] - start[0]) / 1000, (end[1] - start[1]) / 1000))
        cpu, wall = spent["look"][-1]
        decisions = len(handed_on) + (gate.queued > 0)
        spent["hand on"].append((cpu / decisions, wall / decisions))
    return spent


def refused_kib(count: int) -> tuple[int, int]:
    """Return the peak resident KiB after a tenth of ``count`` refused requests, and after all of them.

    Each request has a tenant, a kind and route limits of its own, so that any state kept per key would show.
    """
    gate = BackendGate(AdmissionLimits(max_queue=0), random=random.Random(1))
    gate.report(BackendLoad(running=1, max_running=1), 0.0)
    early = 0
    for number in range(count):
        limits = AdmissionLimits(max_queue=0, max_wait_s=1.0 + number)
        demand = Demand("local", f"t{number}", 0, 100, 100, 0.0, kind=number, limits=limits)
        assert not isinstance(gate.offer(demand, number * 0.001), AdmissionTicket)
        if number == count // 10:
            early = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return early, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that a share of all values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queued", type=int, default=1000)
    parser.add_argument("--running", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--refused", type=int, default=0, help="measure memory after so many refusals")
    parser.add_argument("--json", action="store_true", help="figures for machines")
    options = parser.parse_args()
    if options.refused:
        early, late = refused_kib(options.refused)
        for count, kib in ((options.refused // 10, early), (options.refused, late)):
            print(f"{kib / 1024:.1f} MiB at most after {count:,} refused requests")
        return
    gc.collect()
    gc.freeze()  # as the gateway does once it has started
    figures = {}
    for held_by, memory in (("slots", False), ("memory", True)):
        spent = measure(options.queued, options.running, options.rounds, memory=memory)
        for part, values in spent.items():
            name = "the whole look" if part == "look" else part
            figures[f"{name}, held by {held_by}"] = {
                f"{clock}_{name}_us": round(percentile([value[index] for value in values], share), 1)
                for index, clock in enumerate(("cpu", "wall"))
                for name, share in (("p50", 0.5), ("p99", 0.99))
            }
    if options.json:
        print(json.dumps(figures))
        return
    table = Table(title=f"{options.queued} queued, {options.running} running; bar p99 ≤ {BAR_US:.0f} µs")
    for column in ("decision", "CPU p50 µs", "CPU p99", "wall p50", "wall p99"):
        table.add_column(column)
    for name, row in figures.items():
        table.add_row(name, *map(str, row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
