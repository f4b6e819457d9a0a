"""One simulated vLLM worker: continuous batching, chunked prefill, paged KV memory, recompute preemption.

The scheduler follows vLLM v1. Running sequences come first: one token for each that decodes, then the next
chunk of each prompt that is partly computed. Then waiting sequences start, while budget, slots and blocks
last. When blocks run out, the newest sequence (of the lowest priority, where the engine orders by it) is
preempted and computed again later; a step that had to preempt starts no sequence.

All decoding sequences grow by one token per step, so they are stored as a group: the sum of their contexts,
the ticks at which they end, and how many of them need a new block at which tick. A step costs the same for
any number of them, so that an hour of a trace takes seconds. The tests compare this with a plain model of the
same rules, sequence by sequence.
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
        key: its order among all sequences; the greatest is preempted first.
        target: tokens to compute before one is sampled.
        computed: tokens whose KV is there, cached ones too; of a decoding sequence, as of ``since``.
        blocks: its own blocks, likewise.
        since: the tick at which it began to decode; ``None`` while its prompt is computed.
    """

    outcome: SimulatedRequest
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
    """The results of one step, or of several steps in which no request started or ended its answer."""

    at: float
    first: list[SimulatedRequest] = field(default_factory=list)
    finished: list[SimulatedRequest] = field(default_factory=list)


class SimulatedWorker:
    """The state of a worker; :meth:`advance` runs its next steps."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.memory = BlockMemory(profile.total_blocks, profile.unit_tokens // profile.block_size)
        self.preemptions = 0
        self.steps = 0
        self._waiting: list[SimulatedSequence] = []
        self._filling: list[SimulatedSequence] = []
        self._answering: dict[int, SimulatedSequence] = {}
        self._tick = 0
        self._fed = 0  # 1 while decoding sequences already hold the block of this step's token
        self._context = 0
        self._ends: defaultdict[int, list[SimulatedSequence]] = defaultdict(list)
        self._hungry = [0] * profile.block_size  # sequences that need a block at ticks with this remainder
        self._orders = 0
        self._seen: tuple[int, int, int] | None = None  # running, all, blocks: before the current step
        self._since_seen = 0

    # Public state

    @property
    def busy(self) -> bool:
        """Return whether the worker has any requests."""
        return bool(self._answering or self._filling or self._waiting)

    @property
    def load(self) -> BackendLoad:
        """Return the worker's last report: during a step, the state before it."""
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

    def produced(self, outcome: SimulatedRequest) -> int:
        """Return the tokens of a request's answer so far."""
        one = self._answering.get(outcome.arrival.number)
        return outcome.produced + (self._tick - one.since if one is not None and one.since is not None else 0)

    def submit(self, outcome: SimulatedRequest) -> None:
        """Hand a request on to the worker."""
        self._orders += 1
        rank = -outcome.arrival.priority if self.profile.by_priority else 0
        insort(
            self._waiting, SimulatedSequence(outcome, (rank, self._orders), outcome.arrival.prompt), key=_key
        )
        if self._seen is not None:
            self._since_seen += 1

    def settle(self) -> None:
        """End the step that :meth:`advance` computed: its results become visible."""
        self._seen, self._since_seen = None, 0

    def check(self) -> None:
        """Raise AssertionError unless the block counts are consistent."""
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
        """Run a step, and further ones that begin before ``horizon`` while no answer starts or ends."""
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
            memory.forget()  # sequences before the one without a block have used all idle units
            self._preempt(self._last())
        self._fed = 1
        budget = profile.max_num_batched_tokens - len(self._answering)
        chunks: list[tuple[SimulatedSequence, int]] = []
        for one in tuple(self._filling):
            if one not in self._filling:
                continue  # preempted by an earlier sequence
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
        outcome = one.outcome
        one.computed += tokens
        outcome.computed += tokens
        ready = min(len(one.units), one.computed // self.profile.unit_tokens)
        if ready > one.ready:
            self.memory.ready(one.units[one.ready : ready])
            one.ready = ready
        if one.computed < one.target:
            return
        outcome.produced += 1
        if outcome.first_token_at is None:
            outcome.first_token_at = end.at
            end.first.append(outcome)
        self._filling.remove(one)
        one.since = self._tick
        if outcome.produced >= outcome.output:
            outcome.finished_at = end.at
            end.finished.append(outcome)
            self.memory.give_back(one.units, one.blocks)
            return
        self._answering[outcome.arrival.number] = one
        self._context += one.computed
        self._hungry[self._phase(one)] += 1
        self._ends[self._tick + outcome.output - outcome.produced].append(one)

    def _finish(self, one: SimulatedSequence, end: StepEnd) -> None:
        self._leave(one)
        one.outcome.finished_at = end.at
        end.finished.append(one.outcome)

    def _leave(self, one: SimulatedSequence) -> None:
        """Remove a sequence from the decoding ones, update its counts and release its blocks."""
        ticks = self._tick - (one.since or 0)
        blocks = self._blocks_of(one)
        self._context -= one.computed + ticks
        self._hungry[self._phase(one)] -= 1
        del self._answering[one.outcome.arrival.number]
        one.computed += ticks
        one.outcome.computed += ticks
        one.outcome.produced += ticks
        self.memory.give_back(one.units, blocks)

    def _preempt(self, one: SimulatedSequence) -> None:
        self.preemptions += 1
        outcome = one.outcome
        outcome.preemptions += 1
        if one.since is None:
            self._filling.remove(one)
            self.memory.give_back(one.units, one.blocks)
        else:
            self._ends[(one.since or 0) + outcome.output - outcome.produced].remove(one)
            self._leave(one)
        again = SimulatedSequence(outcome, one.key, outcome.arrival.prompt + outcome.produced)
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
        """Return the remainder of the ticks at which it needs a block: when its own blocks are full."""
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
        """Give the sequence the blocks for ``tokens`` of its tokens; return whether there were enough."""
        own = tokens - len(one.units) * self.profile.unit_tokens
        need = -(-own // self.profile.block_size) - one.blocks
        if need <= 0:
            return True
        if not self.memory.grow(need):
            return False
        one.blocks += need
        return True

    def _begin(self, one: SimulatedSequence, budget: int) -> bool:
        """Start a waiting sequence: find its prefix, and take blocks for its first chunk."""
        profile, outcome = self.profile, one.outcome
        units = outcome.arrival.units[: outcome.arrival.prompt // profile.unit_tokens]
        found, shared = self.memory.find(units)
        units = units[:shared]
        if found * profile.unit_tokens >= one.target:
            found -= 1  # one token must be computed to have logits to sample from
        computed = found * profile.unit_tokens
        covered = one.target if profile.reserve_prompt else min(one.target, computed + budget)
        own = max(0, -(-(covered - shared * profile.unit_tokens) // profile.block_size))
        if not self.memory.start(units, found, own):
            return False
        one.units, one.computed, one.blocks, one.ready = units, computed, own, found
        if outcome.preemptions == 0:
            outcome.cached = computed
        return True
