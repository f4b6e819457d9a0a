"""One worker's load: its own last word, joined with what was sent there since; sans-I/O.

A scrape is the past. Requests sent after it are known here, and are added at once, so that a burst between
two scrapes does not all go to the worker that looked idle. Requests of others are known from the scrape
alone: what it counted above our own. As it grows old they are believed to have grown; when it is too old to
mean anything, only our own count. So a worker whose metrics stay away is neither flooded nor starved.
"""

from __future__ import annotations

from admission.values import BackendLoad
from gateway.backends.workers.scrape import WorkerFigures

# Intervals after which a scrape begins to be doubted, and after which it is no longer believed.
DOUBT_INTERVALS, STALE_INTERVALS = 2.0, 10.0
# How much others' load is believed to have grown when a scrape is about to be no longer believed.
DOUBT_FACTOR = 2.0
# A doubted figure alone must not stop traffic: below admission's threshold of memory pressure.
DOUBTED_KV_USAGE = 0.9


class WorkerLoad:
    """Counts one worker's requests.

    Args:
        interval_s: time between two scrapes, seconds.
        max_running: most sequences that its batch takes; 0 when unknown.
    """

    __slots__ = (
        "_figures",
        "_interval_s",
        "_last",
        "_max_running",
        "_others",
        "_scraped_at",
        "_scrapes",
        "_sent",
        "_told",
        "_unseen_tokens",
    )

    def __init__(self, *, interval_s: float, max_running: int = 0) -> None:
        self._interval_s = interval_s
        self._max_running = max_running
        self._figures: WorkerFigures | None = None
        self._scraped_at = 0.0
        self._others = 0
        # By ticket: prompt tokens, and how many scrapes there had been.
        self._sent: dict[int, tuple[int, int]] = {}
        self._last = 0
        self._scrapes = 0
        self._unseen_tokens = 0
        # The load by a fresh scrape, until something changes: it is asked several times a request.
        self._told: BackendLoad | None = None

    @property
    def in_flight(self) -> int:
        """Requests sent from here that have not ended."""
        return len(self._sent)

    @property
    def adapters(self) -> frozenset[str]:
        """LoRA adapters that it was seen with."""
        return self._figures.adapters if self._figures is not None else frozenset()

    def sent(self, prompt_tokens: int) -> int:
        """A request goes there; the ticket takes it back."""
        self._told = None
        self._last += 1
        self._sent[self._last] = (prompt_tokens, self._scrapes)
        self._unseen_tokens += prompt_tokens
        return self._last

    def ended(self, ticket: int) -> None:
        """It has ended, in whatever way. Raises KeyError for a ticket that is not out."""
        tokens, scrapes = self._sent.pop(ticket)
        self._told = None
        if scrapes == self._scrapes:
            self._unseen_tokens -= tokens

    def scraped(self, figures: WorkerFigures, now: float) -> None:
        """The worker told its figures."""
        self._told = None
        self._figures = figures
        self._scraped_at = now
        self._others = max(0, figures.running + figures.waiting - len(self._sent))
        self._scrapes += 1
        self._unseen_tokens = 0

    @property
    def counted(self) -> tuple[int, int] | None:
        """Prompt and generated tokens since the worker's start, as it last told; ``None``: it does not."""
        told = self._figures
        if told is None or told.prompt_tokens is None or told.generation_tokens is None:
            return None
        return told.prompt_tokens, told.generation_tokens

    def requests(self, now: float) -> float:
        """Requests on the worker as far as can be told: ours, and what others have there."""
        return len(self._sent) + self._others * self._doubt(now)

    def told(self, now: float) -> BackendLoad | None:
        """The worker's load now; ``None`` when it has told nothing that could still be believed."""
        figures = self._figures
        doubt = self._doubt(now)
        if figures is None or not doubt:
            return None
        if doubt == 1.0 and self._told is not None:
            return self._told
        total = len(self._sent) + round(self._others * doubt)
        running = min(total, figures.running + max(0, total - figures.running - figures.waiting))
        if self._max_running:
            running = min(running, self._max_running)
        told = BackendLoad(
            running=running,
            waiting=total - running,
            kv_usage=self._kv_usage(figures, doubt),
            total_blocks=figures.total_blocks,
            block_size=figures.block_size,
            max_running=self._max_running,
        )
        self._told = told if doubt == 1.0 else None
        return told

    def seen(self, now: float) -> tuple[float, float]:
        """:meth:`requests`, and the share of its KV blocks in use, 0 when unknown; at the cost of one."""
        figures, doubt = self._figures, self._doubt(now)
        requests = len(self._sent) + self._others * doubt
        return requests, self._kv_usage(figures, doubt) if figures is not None and doubt else 0.0

    def _kv_usage(self, figures: WorkerFigures, doubt: float) -> float:
        kv_usage = figures.kv_usage
        room = figures.total_blocks * figures.block_size
        if room:
            kv_usage += self._unseen_tokens / room
        if doubt > 1.0:
            kv_usage = min(kv_usage * doubt, max(DOUBTED_KV_USAGE, figures.kv_usage))
        return min(kv_usage, 1.0)

    def _doubt(self, now: float) -> float:
        """What others' requests are multiplied with: 1 while the scrape is fresh, 0 once it says nothing."""
        if self._figures is None:
            return 0.0
        age = (now - self._scraped_at) / self._interval_s
        if age <= DOUBT_INTERVALS:
            return 1.0
        if age >= STALE_INTERVALS:
            return 0.0
        share = (age - DOUBT_INTERVALS) / (STALE_INTERVALS - DOUBT_INTERVALS)
        return 1.0 + share * (DOUBT_FACTOR - 1.0)


def pool_load(loads: list[BackendLoad | None], in_flight: list[int], max_running: int) -> BackendLoad | None:
    """The workers in service together; ``None`` when none of them told anything that can be believed.

    For one that told nothing beside others that did, its requests in flight run.

    Args:
        loads: each worker's own.
        in_flight: each worker's requests from here.
        max_running: most sequences of one worker's batch; 0 when unknown.
    """
    known = [load for load in loads if load is not None]
    if not known:
        return None
    if len(loads) == 1:
        return known[0]
    unknown = sum(count for load, count in zip(loads, in_flight, strict=True) if load is None)
    blocks = sum(load.total_blocks for load in known)
    sizes = {load.block_size for load in known if load.block_size}
    if blocks:
        kv_usage = sum(load.kv_usage * load.total_blocks for load in known) / blocks
    else:
        kv_usage = sum(load.kv_usage for load in known) / len(known)
    # Blocks of different sizes cannot be added up.
    whole = len(known) == len(loads) and len(sizes) == 1
    return BackendLoad(
        running=sum(load.running for load in known) + unknown,
        waiting=sum(load.waiting for load in known),
        kv_usage=kv_usage,
        total_blocks=blocks if whole else 0,
        block_size=sizes.pop() if whole else 0,
        max_running=max_running * len(loads),
        workers=len(loads),
    )
