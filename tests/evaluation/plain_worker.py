"""The rules of the simulated worker, applied sequence by sequence and step by step: slow, but simple."""

from __future__ import annotations

from dataclasses import dataclass, field

from evaluation.simulator.values import Arrival, Profile


@dataclass(eq=False)
class PlainRequest:
    """A request in the worker; ``blocks`` counts its own KV blocks, ``units`` are prefix units that it may share."""

    arrival: Arrival
    order: int
    computed: int = 0
    target: int = 0
    blocks: int = 0
    units: tuple[int, ...] = ()
    produced: int = 0
    total: int = 0
    preemptions: int = 0
    first_at: float | None = None
    done_at: float | None = None
    answering: bool = False

    @property
    def key(self) -> int:
        return self.order


@dataclass
class PlainWorker:
    """A worker that takes each request at its arrival time, without admission."""

    profile: Profile
    waiting: list[PlainRequest] = field(default_factory=list)
    running: list[PlainRequest] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)  # idle units, oldest first
    ready: set[int] = field(default_factory=set)

    def run(self, arrivals: list[Arrival]) -> list[PlainRequest]:
        all_of_them = [PlainRequest(arrival, n, target=arrival.prompt) for n, arrival in enumerate(arrivals)]
        coming, now = list(all_of_them), 0.0
        while coming or self.waiting or self.running:
            if not self.waiting and not self.running:
                now = max(now, coming[0].arrival.at)
            while coming and (coming[0].arrival.at < now or not (self.waiting or self.running)):
                self.waiting.append(coming.pop(0))
            now = self.step(now)
        return all_of_them

    # Memory

    def held(self) -> dict[int, int]:
        counts: dict[int, int] = {}
        for one in self.running:
            for unit in one.units:
                counts[unit] = counts.get(unit, 0) + 1
        return counts

    def free(self) -> int:
        unit_blocks = self.profile.unit_tokens // self.profile.block_size
        used = sum(one.blocks for one in self.running) + len(self.held()) * unit_blocks
        return self.profile.total_blocks - used

    def trim(self) -> None:
        unit_blocks = self.profile.unit_tokens // self.profile.block_size
        while self.free() < len(self.cached) * unit_blocks:
            self.ready.discard(self.cached.pop(0))

    def cover(self, one: PlainRequest, tokens: int) -> bool:
        own = tokens - len(one.units) * self.profile.unit_tokens
        need = -(-own // self.profile.block_size) - one.blocks
        if need > self.free():
            return False
        one.blocks += max(0, need)
        self.trim()
        return True

    def leave(self, one: PlainRequest) -> None:
        self.running.remove(one)
        held = self.held()
        for unit in reversed(one.units):
            if unit not in held and unit in self.ready:
                self.cached.append(unit)
        one.units, one.blocks = (), 0

    # A step

    def step(self, now: float) -> float:
        profile = self.profile
        budget = profile.max_num_batched_tokens
        work: dict[PlainRequest, int] = {}
        preempted = False
        for answering in (True, False):
            for one in sorted(
                [one for one in self.running if one.answering is answering], key=lambda o: o.key
            ):
                if one not in self.running:
                    continue
                tokens = 1 if answering else min(one.target - one.computed, budget)
                while one in self.running and not self.cover(one, one.computed + tokens):
                    victim = max(self.running, key=lambda o: o.key)
                    budget += work.pop(victim, 0)
                    self.preempt(victim)
                    preempted = True
                if one in self.running and tokens:
                    work[one] = tokens
                    budget -= tokens
        while self.waiting and budget > 0 and not preempted and len(self.running) < profile.max_num_seqs:
            one = self.waiting[0]
            if not self.begin(one, budget):
                break
            self.waiting.pop(0)
            work[one] = min(one.target - one.computed, budget)
            budget -= work[one]
        answering_now = [one for one in work if one.answering]
        now += profile.step_s(
            sum(tokens for one, tokens in work.items() if not one.answering),
            len(answering_now),
            sum(one.computed for one in answering_now),
        )
        for one in [*answering_now, *(one for one in work if not one.answering)]:
            self.computed(one, work[one], now)
        return now

    def computed(self, one: PlainRequest, tokens: int, now: float) -> None:
        one.computed += tokens
        one.total += tokens
        if not one.answering:
            self.ready.update(one.units[: one.computed // self.profile.unit_tokens])
        if one.computed < one.target:
            return
        one.produced += 1
        one.target = one.computed + 1
        one.answering = True
        one.first_at = now if one.first_at is None else one.first_at
        if one.produced >= one.arrival.output:
            one.done_at = now
            self.leave(one)

    def preempt(self, one: PlainRequest) -> None:
        self.leave(one)
        one.computed, one.target = 0, one.arrival.prompt + one.produced
        one.answering = False
        one.preemptions += 1
        self.waiting.append(one)
        self.waiting.sort(key=lambda o: o.key)

    def begin(self, one: PlainRequest, budget: int) -> bool:
        profile = self.profile
        units = one.arrival.units[: one.arrival.prompt // profile.unit_tokens]
        held = self.held()
        found = 0
        while found < len(units) and units[found] in self.ready:
            found += 1
        shared = found
        while shared < len(units) and not (units[shared] in held and units[shared] not in self.ready):
            shared += 1
        units = units[:shared]
        if found * profile.unit_tokens >= one.target:
            found -= 1
        computed = found * profile.unit_tokens
        covered = one.target if profile.reserve_prompt else min(one.target, computed + budget)
        own = max(0, -(-(covered - shared * profile.unit_tokens) // profile.block_size))
        unit_blocks = profile.unit_tokens // profile.block_size
        if sum(unit not in held for unit in units) * unit_blocks + own > self.free():
            return False
        self.cached = [unit for unit in self.cached if unit not in units]
        one.units, one.computed, one.blocks = units, computed, own
        self.running.append(one)
        self.trim()
        return True
