"""One simulated vLLM worker: continuous batching, chunked prefill, paged KV memory, recompute preemption.

The scheduler is vLLM v1's in its outline. Running sequences come first, a token each for those that answer,
then the next chunk for those whose prompt is partly computed; then waiting ones, while budget, slots and
blocks last. When blocks run out the newest (of the lowest priority, where the engine goes by it) is preempted
and computed again later; a step that had to preempt starts nobody.

All that answer grow by one token a step, so they are kept as a group: the sum of their contexts, the ticks at
which they end, and how many of them need a new block at which tick. A step costs the same however many they
are, which is what makes an hour of trace take seconds. A plain model of the same rules, sequence by sequence,
is compared with it in the tests.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import defaultdict
from dataclasses import dataclass, field
from operator import attrgetter

from admission.values import BackendLoad
from evaluation.simulator.memory import BlockMemory
from evaluation.simulator.values import Profile, SimulatedRequest


@dataclass(slots=True, eq=False)
class SimulatedSequence:
    """A request inside the worker.

    Args:
        key: its place among all; the greatest is preempted first.
        target: tokens to compute before one is sampled.
        computed: tokens whose KV is there, cached ones included; of one that answers, as of ``since``.
        blocks: of its own, likewise.
        since: the tick at which it began to answer; ``None`` while its prompt is computed.
    """

    fate: SimulatedRequest
    key: tuple[int, int]
    target: int
    computed: int = 0
    blocks: int = 0
    units: tuple[int, ...] = ()
    ready: int = 0
    since: int | None = None


_key = attrgetter("key")


@dataclass(slots=True)
class StepEnd:
    """What a step, or several in which nothing happened, has brought about."""

    at: float
    first: list[SimulatedRequest] = field(default_factory=list)
    finished: list[SimulatedRequest] = field(default_factory=list)


class SimulatedWorker:
    """A worker at one moment; :meth:`advance` moves it on."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.memory = BlockMemory(profile.total_blocks, profile.unit_tokens // profile.block_size)
        self.preemptions = 0
        self.steps = 0
        self._waiting: list[SimulatedSequence] = []
        self._filling: list[SimulatedSequence] = []
        self._answering: dict[int, SimulatedSequence] = {}
        self._tick = 0
        self._fed = 0  # 1 while those who answer already hold the block of this step's token
        self._context = 0
        self._ends: defaultdict[int, list[SimulatedSequence]] = defaultdict(list)
        self._hungry = [0] * profile.block_size  # who needs a block when the tick has this remainder
        self._orders = 0
        self._seen: tuple[int, int, int] | None = None  # running, in all, blocks: as the running step began
        self._since_seen = 0

    # What is seen from outside

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._answering or self._filling or self._waiting)

    @property
    def load(self) -> BackendLoad:
        """What the worker has last told: during a step, how things stood before it."""
        profile = self.profile
        running, whole, used = self._state() if self._seen is None else self._seen
        return BackendLoad(
            running=running,
            waiting=whole - running + self._since_seen,
            kv_usage=used / profile.total_blocks,
            total_blocks=profile.total_blocks,
            block_size=profile.block_size,
            max_running=profile.max_num_seqs,
        )

    def produced(self, fate: SimulatedRequest) -> int:
        """Tokens of its answer so far."""
        one = self._answering.get(fate.arrival.number)
        return fate.produced + (self._tick - one.since if one is not None and one.since is not None else 0)

    def submit(self, fate: SimulatedRequest) -> None:
        """Hand a request on to the worker."""
        self._orders += 1
        rank = -fate.arrival.priority if self.profile.by_priority else 0
        insort(self._waiting, SimulatedSequence(fate, (rank, self._orders), fate.arrival.prompt), key=_key)
        if self._seen is not None:
            self._since_seen += 1

    def settle(self) -> None:
        """The step that :meth:`advance` computed has ended: what it did can be seen."""
        self._seen, self._since_seen = None, 0

    def check(self) -> None:
        """Raises AssertionError unless the books agree."""
        held = sum(self._blocks_of(one) for one in (*self._filling, *self._answering.values()))
        units = {unit for one in (*self._filling, *self._answering.values()) for unit in one.units}
        used = held + len(units) * (self.profile.unit_tokens // self.profile.block_size)
        assert used == self.memory.used, (used, self.memory.used)
        assert used + self.memory.idle <= self.profile.total_blocks
        assert self._running <= self.profile.max_num_seqs
        assert self._context == sum(self._computed_of(one) for one in self._answering.values())
        assert sum(self._hungry) == len(self._answering)

    # Steps

    def advance(self, now: float, horizon: float = math.inf) -> StepEnd:
        """Take a step, and further ones while nothing ends and they begin before ``horizon``."""
        self.settle()
        end = StepEnd(now)
        while True:
            self._seen = self._state()
            self._step(end)
            if end.first or end.finished or end.at >= horizon or not self.busy:
                return end

    def _step(self, end: StepEnd) -> None:
        profile, memory = self.profile, self.memory
        preempted_before = self.preemptions
        while not memory.grow(self._hungry[self._tick % profile.block_size]):
            memory.forget()  # those before the one that finds no block have had all that could be had
            self._preempt(self._last())
        self._fed = 1
        budget = profile.max_num_batched_tokens - len(self._answering)
        chunks: list[tuple[SimulatedSequence, int]] = []
        for one in tuple(self._filling):
            if one not in self._filling:
                continue  # preempted for one before it
            tokens = min(one.target - one.computed, budget)
            while one in self._filling and not self._cover(one, one.computed + tokens):
                victim = self._last()
                lost = 1 if victim.since is not None else sum(n for other, n in chunks if other is victim)
                budget += lost
                chunks = [chunk for chunk in chunks if chunk[0] is not victim]
                self._preempt(victim)
            if one in self._filling and tokens:
                chunks.append((one, tokens))
                budget -= tokens
        while (
            self._waiting
            and budget > 0
            and self.preemptions == preempted_before
            and self._running < profile.max_num_seqs
            and self._begin(self._waiting[0], budget)
        ):
            one = self._waiting.pop(0)
            insort(self._filling, one, key=_key)
            tokens = min(one.target - one.computed, budget)
            chunks.append((one, tokens))
            budget -= tokens
        answering = len(self._answering)
        prefill = sum(tokens for _, tokens in chunks) if chunks else 0
        end.at += profile.step_s(prefill, answering, self._context)
        self.steps += 1
        self._tick += 1
        self._fed = 0
        self._context += answering
        for one in self._ends.pop(self._tick, ()):
            self._finish(one, end)
        for one, tokens in chunks:
            self._computed(one, tokens, end)

    def _computed(self, one: SimulatedSequence, tokens: int, end: StepEnd) -> None:
        fate = one.fate
        one.computed += tokens
        fate.computed += tokens
        ready = min(len(one.units), one.computed // self.profile.unit_tokens)
        if ready > one.ready:
            self.memory.ready(one.units[one.ready : ready])
            one.ready = ready
        if one.computed < one.target:
            return
        fate.produced += 1
        if fate.first_token_at is None:
            fate.first_token_at = end.at
            end.first.append(fate)
        self._filling.remove(one)
        one.since = self._tick
        if fate.produced >= fate.output:
            fate.finished_at = end.at
            end.finished.append(fate)
            self.memory.give_back(one.units, one.blocks)
            return
        self._answering[fate.arrival.number] = one
        self._context += one.computed
        self._hungry[self._phase(one)] += 1
        self._ends[self._tick + fate.output - fate.produced].append(one)

    def _finish(self, one: SimulatedSequence, end: StepEnd) -> None:
        self._leave(one)
        one.fate.finished_at = end.at
        end.finished.append(one.fate)

    def _leave(self, one: SimulatedSequence) -> None:
        """Take one out of those that answer, its counts brought up to date and its blocks given back."""
        ticks = self._tick - (one.since or 0)
        blocks = self._blocks_of(one)
        self._context -= one.computed + ticks
        self._hungry[self._phase(one)] -= 1
        del self._answering[one.fate.arrival.number]
        one.computed += ticks
        one.fate.computed += ticks
        one.fate.produced += ticks
        self.memory.give_back(one.units, blocks)

    def _preempt(self, one: SimulatedSequence) -> None:
        self.preemptions += 1
        fate = one.fate
        fate.preemptions += 1
        if one.since is None:
            self._filling.remove(one)
            self.memory.give_back(one.units, one.blocks)
        else:
            self._ends[(one.since or 0) + fate.output - fate.produced].remove(one)
            self._leave(one)
        again = SimulatedSequence(fate, one.key, fate.arrival.prompt + fate.produced)
        insort(self._waiting, again, key=_key)

    def _last(self) -> SimulatedSequence:
        return max((*self._answering.values(), *self._filling), key=_key)

    # Memory

    @property
    def _running(self) -> int:
        return len(self._answering) + len(self._filling)

    def _state(self) -> tuple[int, int, int]:
        running = len(self._answering) + len(self._filling)
        return running, running + len(self._waiting), self.memory.used

    def _phase(self, one: SimulatedSequence) -> int:
        """The remainder of the ticks at which it needs a block: when its own tokens fill theirs."""
        own = one.computed - len(one.units) * self.profile.unit_tokens
        return ((one.since or 0) - own) % self.profile.block_size

    def _computed_of(self, one: SimulatedSequence) -> int:
        return one.computed + (self._tick - one.since if one.since is not None else 0)

    def _blocks_of(self, one: SimulatedSequence) -> int:
        if one.since is None:
            return one.blocks
        own = self._computed_of(one) - len(one.units) * self.profile.unit_tokens
        return -(-(own + self._fed) // self.profile.block_size)

    def _cover(self, one: SimulatedSequence, tokens: int) -> bool:
        """Blocks for so many of its tokens."""
        own = tokens - len(one.units) * self.profile.unit_tokens
        need = -(-own // self.profile.block_size) - one.blocks
        if need <= 0:
            return True
        if not self.memory.grow(need):
            return False
        one.blocks += need
        return True

    def _begin(self, one: SimulatedSequence, budget: int) -> bool:
        """Let a waiting sequence in: find its prefix, take blocks for its first chunk."""
        profile, fate = self.profile, one.fate
        units = fate.arrival.units[: fate.arrival.prompt // profile.unit_tokens]
        found, shared = self.memory.find(units)
        units = units[:shared]
        if found * profile.unit_tokens >= one.target:
            found -= 1  # a token must be computed, so that there is something to sample from
        computed = found * profile.unit_tokens
        covered = one.target if profile.reserve_prompt else min(one.target, computed + budget)
        own = max(0, -(-(covered - shared * profile.unit_tokens) // profile.block_size))
        if not self.memory.start(units, found, own):
            return False
        one.units, one.computed, one.blocks, one.ready = units, computed, own, found
        if fate.preemptions == 0:
            fate.cached = computed
        return True
