"""One worker's load: its last scraped metrics, plus the requests sent to it since; sans-I/O.

Requests sent after a scrape are added at once, so that a burst between two scrapes does not all go to the
worker that was idle. Requests of other gateways are known from the scrape only: its count minus our own. As
the scrape ages, their number is scaled up; once it is too old, only our own requests count. So a worker
whose metrics are missing is neither flooded nor starved.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from admission.values import BackendLoad
from observability.metrics_text import samples_of

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
CACHE_CONFIG = "vllm:cache_config_info"
LORA = "vllm:lora_requests_info"
PROMPT_TOKENS = "vllm:prompt_tokens_total"
GENERATION_TOKENS = "vllm:generation_tokens_total"
_SUMS = frozenset({RUNNING, WAITING, PROMPT_TOKENS, GENERATION_TOKENS})
_WANTED = (*_SUMS, KV_USAGE, CACHE_CONFIG, LORA)

_MAX_VALUE = 1e15  # larger values, infinity and NaN are ignored


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """A worker's metrics, summed over all engines of its server (KV usage: the mean).

    Args:
        adapters: LoRA adapters with running or waiting requests.
        tokens: prompt and generated tokens since the server's start; ``None`` when not reported.
    """

    load: BackendLoad
    adapters: frozenset[str] = field(default_factory=frozenset)
    tokens: tuple[int, int] | None = None


def read_figures(text: str) -> WorkerFigures | None:
    """The figures of a metrics page; ``None`` when it has no metric of running or waiting requests."""
    total_blocks = block_size = 0
    usages: list[float] = []
    sums: dict[str, int] = {}
    adapters: frozenset[str] = frozenset()
    newest_at = float("-inf")
    for sample in samples_of(text, *_WANTED):
        name, number = sample.name, sample.value
        if not abs(number) < _MAX_VALUE:
            continue
        if name in _SUMS:
            sums[name] = sums.get(name, 0) + int(number)
        elif name == KV_USAGE:
            usages.append(min(max(number, 0.0), 1.0))
        elif name == CACHE_CONFIG:
            blocks = _count(sample.labels.get("num_gpu_blocks"))
            # vLLM's first block holds nothing: a model without a KV cache, such as a BERT, has it alone.
            total_blocks += blocks if blocks > 1 else 0
            block_size = _count(sample.labels.get("block_size")) or block_size
        elif number >= newest_at:
            # There is a series for each set of adapters since the start; its value is a timestamp.
            newest_at = number
            both = (sample.labels.get(f"{state}_lora_adapters", "") for state in ("running", "waiting"))
            adapters = frozenset(name.strip() for name in ",".join(both).split(",") if name.strip())
    if RUNNING not in sums and WAITING not in sums:
        return None
    kv_usage = sum(usages) / len(usages) if usages else 0.0
    load = BackendLoad(sums.get(RUNNING, 0), sums.get(WAITING, 0), kv_usage, total_blocks, block_size)
    reported = PROMPT_TOKENS in sums and GENERATION_TOKENS in sums
    tokens = (sums[PROMPT_TOKENS], sums[GENERATION_TOKENS]) if reported else None
    return WorkerFigures(load, adapters, tokens)


def _count(value: str | None) -> int:
    return int(value) if value is not None and value.isdecimal() and len(value) < 12 else 0


# Age of a scrape, in intervals, from which others' load is scaled up, and from which it is ignored.
DOUBT_INTERVALS, STALE_INTERVALS = 2.0, 10.0
DOUBT_FACTOR = 2.0  # factor of others' load just before the scrape is ignored
# Upper bound of a scaled-up KV usage, below admission's threshold of memory pressure: an old figure alone
# must not stop traffic.
DOUBTED_KV_USAGE = 0.9


class WorkerLoad:
    """Counts one worker's requests.

    Args:
        interval_s: time between two scrapes, seconds.
        max_running: most sequences in the worker's batch; 0 when unknown.
    """

    def __init__(self, *, interval_s: float, max_running: int = 0) -> None:
        self._interval_s = interval_s
        self._max_running = max_running
        self._figures: WorkerFigures | None = None
        self.reports = False  # whether it was ever scraped
        self._scraped_at = self._fresh_until = 0.0
        self._others = 0
        # Requests in flight, by ticket: prompt tokens, and the number of scrapes before the request.
        self._sent: dict[int, tuple[int, int]] = {}
        self._last = 0
        self._scrapes = 0
        self._unseen_tokens = 0
        # The load computed from a fresh scrape, cached until it changes: it is read several times a request.
        self._cached: BackendLoad | None = None

    @property
    def in_flight(self) -> int:
        return len(self._sent)

    @property
    def adapters(self) -> frozenset[str]:
        return self._figures.adapters if self._figures is not None else frozenset()

    def sent(self, prompt_tokens: int) -> int:
        """Count a request sent to the worker; returns a ticket for :meth:`ended`."""
        self._cached = None
        self._last += 1
        self._sent[self._last] = (prompt_tokens, self._scrapes)
        self._unseen_tokens += prompt_tokens
        return self._last

    def ended(self, ticket: int) -> None:
        """Remove a request that has ended, whatever its outcome. Raises KeyError for an unknown ticket."""
        tokens, scrapes = self._sent.pop(ticket)
        self._cached = None
        if scrapes == self._scrapes:
            self._unseen_tokens -= tokens

    def scraped(self, figures: WorkerFigures, now: float) -> None:
        self._cached = None
        self._figures = figures
        self.reports = True
        self._scraped_at = now
        self._fresh_until = now + DOUBT_INTERVALS * self._interval_s
        self._others = max(0, figures.load.running + figures.load.waiting - len(self._sent))
        self._scrapes += 1
        self._unseen_tokens = 0

    @property
    def counted(self) -> tuple[int, int] | None:
        """Prompt and generated tokens since the worker's start; ``None`` when it does not report them."""
        return self._figures.tokens if self._figures is not None else None

    def current(self, now: float) -> BackendLoad | None:
        """The worker's load now; ``None`` without a scrape that is recent enough."""
        fresh = now <= self._fresh_until
        if fresh and self._cached is not None:
            return self._cached
        figures, doubt = self._figures, 1.0 if fresh else self._doubt(now)
        if figures is None or not doubt:
            return None
        reported = figures.load
        total = len(self._sent) + (self._others if fresh else round(self._others * doubt))
        waiting = reported.waiting and max(0, min(reported.waiting, total - reported.running))
        if 0 < self._max_running < total - waiting:
            waiting = total - self._max_running
        load = BackendLoad(
            running=total - waiting,
            waiting=waiting,
            kv_usage=self._kv_usage(reported, doubt),
            total_blocks=reported.total_blocks,
            block_size=reported.block_size,
            max_running=self._max_running,
        )
        self._cached = load if fresh else None
        return load

    def requests_and_kv_usage(self, now: float) -> tuple[float, float]:
        """Estimated requests, ours and those of others; share of KV blocks in use, 0 when unknown."""
        figures, doubt = self._figures, self._doubt(now)
        requests = len(self._sent) + self._others * doubt
        return requests, self._kv_usage(figures.load, doubt) if figures is not None and doubt else 0.0

    def _kv_usage(self, reported: BackendLoad, doubt: float) -> float:
        kv_usage = reported.kv_usage
        room = reported.total_blocks * reported.block_size
        if room:
            kv_usage += self._unseen_tokens / room
        if doubt > 1.0:
            kv_usage = min(kv_usage * doubt, max(DOUBTED_KV_USAGE, reported.kv_usage))
        return kv_usage if kv_usage < 1.0 else 1.0

    def _doubt(self, now: float) -> float:
        """Factor of others' requests: 1 while the scrape is fresh, 0 when it is missing or too old."""
        if self._figures is None:
            return 0.0
        age = (now - self._scraped_at) / self._interval_s
        if age <= DOUBT_INTERVALS:
            return 1.0
        if age >= STALE_INTERVALS:
            return 0.0
        share = (age - DOUBT_INTERVALS) / (STALE_INTERVALS - DOUBT_INTERVALS)
        return 1.0 + share * (DOUBT_FACTOR - 1.0)


def own_load(loads: Sequence[WorkerLoad], max_running: int) -> BackendLoad | None:
    """Our own requests on workers of which no scrape is recent enough; ``None`` if none was ever scraped.

    With ``None`` instead, admission would keep the last report, and a full worker would stay full for it.
    ``max_running``: as of :func:`pool_load`.
    """
    if not any(load.reports for load in loads):
        return None
    most, total = max_running * len(loads), sum(load.in_flight for load in loads)
    running = min(total, most or total)
    return BackendLoad(running, total - running, max_running=most, workers=len(loads))


def pool_load(
    loads: Sequence[BackendLoad | None], in_flight: Sequence[int], max_running: int
) -> BackendLoad | None:
    """The sum over the workers in service; ``None`` when the load of none of them is known.

    A worker whose load is unknown counts with its requests in flight, as running.

    Args:
        loads: each worker's load; ``None``: unknown.
        in_flight: each worker's requests sent from here.
        max_running: most sequences of one worker's batch; 0 when unknown.
    """
    if len(loads) == 1:
        return loads[0]
    known = running = waiting = blocks = block_size = 0
    usage = usage_of_blocks = 0.0
    whole = True  # every worker's blocks are known, and of one size: else they cannot be added up
    for load, count in zip(loads, in_flight, strict=True):  # one loop: each request reads the load twice
        if load is None:
            running += count
            whole = False
            continue
        known += 1
        running += load.running
        waiting += load.waiting
        usage += load.kv_usage
        blocks += load.total_blocks
        usage_of_blocks += load.kv_usage * load.total_blocks
        if load.block_size:
            whole = whole and block_size in (0, load.block_size)
            block_size = load.block_size
    if not known:
        return None
    whole = whole and block_size > 0
    return BackendLoad(
        running=running,
        waiting=waiting,
        kv_usage=usage_of_blocks / blocks if blocks else usage / known,
        total_blocks=blocks if whole else 0,
        block_size=block_size if whole else 0,
        max_running=max_running * len(loads),
        workers=len(loads),
    )
