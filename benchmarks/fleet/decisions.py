"""CPU cost of placing one request on a worker, without the gate: the pool's load, pick and bookkeeping."""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import dataclass

from admission.values import BackendLoad
from benchmarks.fleet.front import Known
from evaluation.simulator.measures import percentile
from gateway.backends.workers.load import WorkerFigures
from gateway.backends.workers.pool import WHOLE_UP_TO, WorkerPool
from gateway.backends.workers.worker_choice import WorkerChoice, WorkerPreference

# Requests in flight on each worker, blocks of a prompt, conversations that are continued.
ON_EACH, BLOCKS, CONVERSATIONS = 4, 16, 500
REQUESTS = 1500
# Requests per second and worker: it sets how many requests are placed between two scrapes of all workers.
RATE = 1.0


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time of placing a request, in microseconds: with every worker examined, and with a shortlist."""

    workers: int
    whole_p50_us: float
    whole_mean_us: float
    short_p50_us: float
    short_p99_us: float
    short_mean_us: float


def cost_of(workers: int, *, requests: int = REQUESTS, seed: int = 1) -> Cost:
    """Measure with every worker examined, and with a shortlist."""
    whole = _costs(workers, workers, max(50, min(requests, 100_000 // workers)), seed)
    short = _costs(workers, WHOLE_UP_TO, requests, seed)
    return Cost(
        workers,
        1e6 * percentile(whole, 0.5),
        1e6 * sum(whole) / len(whole),
        1e6 * percentile(short, 0.5),
        1e6 * percentile(short, 0.99),
        1e6 * sum(short) / len(short),
    )


def _costs(workers: int, whole_up_to: int, requests: int, seed: int) -> list[float]:
    draw = random.Random(seed)
    seen = [Known(number, interval_s=1.0, max_running=128) for number in range(workers)]
    choice = WorkerChoice([one.url for one in seen])
    pool = WorkerPool(seen, choice, max_running=128, random=draw, whole_up_to=whole_up_to)
    figures = WorkerFigures(BackendLoad(2 * ON_EACH, 0, 0.3, 6800, 16))
    for one in seen:
        one.load.scraped(figures, 0.0)
    out: deque[tuple[Known, int]] = deque()
    for number in range(ON_EACH * workers):
        one = seen[number % workers]
        out.append((one, pool.sent(one, 1000, WorkerPreference((-number - 1,)))))
    costs = []
    for number in range(requests):
        now = 0.001 + number / (RATE * workers)
        # Every second request continues a conversation; the others are new.
        first = draw.randrange(CONVERSATIONS) if number % 2 else CONVERSATIONS + number
        preference = WorkerPreference([first * 1000 + block for block in range(BLOCKS)])
        if number % max(1, round(RATE * workers)) == 0:
            for one in seen:
                one.load.scraped(figures, now)
        began = time.thread_time()
        pool.load(now)
        picked = pool.pick(preference, (), now)
        if picked is None:
            raise AssertionError("no worker is in service, and none was taken out")
        out.append((picked, pool.sent(picked, 1000, preference)))
        pool.ended(*out.popleft())
        costs.append(time.thread_time() - began)
    return sorted(costs)
