"""Fault injection: wraps a backend, only when ``chaos.enabled`` is true."""

import asyncio
import random
from collections import Counter
from collections.abc import Collection, Sequence

import structlog

from gateway.backends.port import Backend, Completion, DelegatingBackend, DeltaSink, Work, configured_name
from gateway.config.chaos import FaultRule
from gateway.contracts.events import Delta
from gateway.errors import InvalidRequest
from resilience.failures import BackendFailure, FailureKind


class FaultPlan:
    """Selects the fault for each call, by the first of its rules that applies; ``backends`` may be named."""

    def __init__(self, backends: Collection[str], random: random.Random) -> None:
        self._backends = backends
        self._random = random
        # Faults injected since the start, by backend and kind.
        self.injected = Counter[tuple[str, str]]()
        self.rules: Sequence[FaultRule] = ()

    def replace(self, rules: Sequence[FaultRule]) -> None:
        """Put other rules in force; their counts start at zero.

        Raises InvalidRequest for a backend that does not exist.
        """
        for number, rule in enumerate(rules):
            if rule.backend not in self._backends:
                raise InvalidRequest(
                    f"there is no backend {rule.backend!r}; allowed: {', '.join(sorted(self._backends))}",
                    param=f"faults.{number}.backend",
                )
        self.rules = tuple(rules)
        self._seen = [0] * len(self.rules)
        self._done = [0] * len(self.rules)
        structlog.get_logger("gateway").warning("other faults are in force", rules=len(rules))

    def next(self, backend: str) -> FaultRule | None:
        """The fault for the next call of ``backend``."""
        chosen: int | None = None
        for number, rule in enumerate(self.rules):
            if rule.backend != configured_name(backend):
                continue
            self._seen[number] += 1
            if chosen is None and self._hits(number, rule):
                chosen = number
        if chosen is None:
            return None
        self._done[chosen] += 1
        return self.rules[chosen]

    def count_injected(self, rule: FaultRule) -> None:
        """Count an injected fault; a chosen fault is not injected if the answer is too short for it."""
        self.injected[rule.backend, str(rule.kind)] += 1

    def _hits(self, number: int, rule: FaultRule) -> bool:
        if rule.times is not None and self._done[number] >= rule.times:
            return False
        if rule.probability is not None:
            return self._random.random() < rule.probability
        return self._seen[number] % (rule.every or 1) == 0


class FaultyBackend(DelegatingBackend):
    """Delegates to the wrapped backend, except for injected faults."""

    def __init__(self, inner: Backend, plan: FaultPlan) -> None:
        self._inner = inner
        self._plan = plan

    @property
    def delegate(self) -> Backend:
        return self._inner

    async def generate(self, work: Work, out: DeltaSink) -> Completion:
        rule = self._plan.next(self.name)
        if rule is None:
            return await self.delegate.generate(work, out)
        call = _Call(rule, self._plan, out)
        if not rule.after_tokens and rule.kind != "slow":
            await call.strike()
        try:
            return await self.delegate.generate(work, call.push)
        except Exception as error:
            # The caller gets the fault, however the wrapped backend handles an error of its sink.
            raise call.failure or error from None


class _Struck(Exception):
    """Ends the wrapped backend's call through its sink; no handler of the backend catches it."""


class _Call:
    """One call with an injected fault."""

    def __init__(self, rule: FaultRule, plan: FaultPlan, out: DeltaSink) -> None:
        self._rule = rule
        self._plan = plan
        self._out = out
        self._tokens = 0
        self._slowed = False
        self.failure: BackendFailure | None = None

    async def push(self, delta: Delta) -> None:
        """Pass a delta on, late or not at all."""
        if self.failure is not None:
            raise _Struck
        if self._tokens >= self._rule.after_tokens:
            if self._rule.kind != "slow":
                try:
                    await self.strike()
                except BackendFailure as failure:
                    self.failure = failure
                    raise _Struck from None
            if not self._slowed:
                self._slowed = True
                self._plan.count_injected(self._rule)
            await asyncio.sleep(self._rule.delay_ms / 1000)
        self._tokens += delta.tokens
        await self._out(delta)

    async def strike(self) -> None:
        """Inject the fault. Raises BackendFailure; a hang ends only by cancellation."""
        self._plan.count_injected(self._rule)
        if self._rule.kind == "hang":
            await asyncio.get_running_loop().create_future()
        raise BackendFailure(FailureKind(self._rule.kind), f"{self._rule.kind} on purpose (chaos)")
