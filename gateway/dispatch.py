"""Handing admitted work to a backend, guarded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from adapters.values import Adapter
from admission.controller import Slot
from budgeting.values import Plan
from gateway.backends.port import Backend, BackendState, Completion, Feature, Work
from gateway.contracts.values import Contract, Fallback, FinishReason, GenerateRequest, Usage
from gateway.meter import Meter
from resilience.errors import DeadlinePassed
from resilience.failures import BackendFailure, FailureKind
from resilience.guard import Guard

# Sampling hints that the native contract may lose, by the feature they ask for.
_HINTS: Mapping[Feature, str] = MappingProxyType(
    {
        Feature.TEMPERATURE: "temperature",
        Feature.TOP_P: "top_p",
        Feature.TOP_K: "top_k",
        Feature.MIN_P: "min_p",
        Feature.SEED: "seed",
    }
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the answer came to be: from which backend, how it ended, what was left out on the way."""

    completion: Completion
    backend: str
    backend_name: str
    model: str
    adapter: Adapter | None = None
    fallback: Fallback | None = None
    warnings: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        """``<base>+<adapter>``: which weights answered."""
        return f"{self.model}+{self.adapter.adapter_id}" if self.adapter else self.model


class Dispatcher:
    """Generates on a backend what admission has let through."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    async def generate(
        self,
        slot: Slot,
        backend: Backend,
        request: GenerateRequest,
        plan: Plan,
        adapter: Adapter | None,
        meter: Meter,
    ) -> Outcome:
        """Generate on ``backend``; the slot is the permission to do so.

        A deadline that passes after the first token ends the answer with what there is.

        Raises:
            BackendFailure: the backend failed and retrying on it did not help.
            DeadlinePassed: before the first token.
        """
        if backend.state is not BackendState.READY:
            slot.ignored()  # its state tells already; the circuit counts answers
            raise _not_ready(backend)
        work, warnings = bind(backend, request, plan, adapter, slot)
        meter.started(slot.first_token)
        try:
            completion = await self._guard.run(
                lambda _: backend.generate(work, meter.take),
                backend=backend.name,
                delivered=lambda: meter.delivered,
                deadline=request.deadline,
            )
            slot.succeeded()
        except BackendFailure as failure:
            if not failure.policy.other_backend:
                slot.ignored()  # the request is at fault: it says nothing about the backend
            raise
        except DeadlinePassed:
            slot.ignored()
            if not meter.delivered:
                raise
            usage = Usage(len(work.token_ids), meter.tokens, meter.cached_tokens)
            others = (FinishReason.DEADLINE,) * (work.sampling.n - 1)
            completion = Completion(FinishReason.DEADLINE, usage, meter.queue_wait_s, others)
        return Outcome(
            completion=completion,
            backend=backend.kind,
            backend_name=backend.name,
            model=backend.model,
            adapter=adapter,
            warnings=warnings,
        )


def bind(
    backend: Backend, request: GenerateRequest, plan: Plan, adapter: Adapter | None, slot: Slot
) -> tuple[Work, tuple[str, ...]]:
    """The work as this backend can do it, and what had to be left out.

    In the native contract a sampling hint that the backend lacks is dropped or lowered and named; OpenAI's
    contract never gets here with one, since ranking passes such backends over.
    """
    warnings = []
    max_tokens = plan.generation_reserve
    if slot.shrunk:
        # Shrink before shed: a long queue shortens answers, and says so.
        max_tokens = max(1, slot.max_tokens // request.sampling.n)
        warnings.append(f"max_tokens was lowered to {max_tokens} because many requests are waiting")
    sampling = request.sampling
    changed: dict[str, Any] = {} if sampling.max_tokens == max_tokens else {"max_tokens": max_tokens}
    if request.contract is Contract.NATIVE:
        for feature, name in _HINTS.items():
            if feature not in backend.features and getattr(sampling, name) is not None:
                changed[name] = None
                warnings.append(f"{name} is not supported by {backend.name} and was dropped")
        hot = sampling.temperature is not None and sampling.temperature > 1.0
        if hot and "temperature" not in changed and Feature.TEMPERATURE_ABOVE_1 not in backend.features:
            changed["temperature"] = 1.0
            warnings.append(f"temperature was lowered to 1, the highest that {backend.name} takes")
    work = Work(
        generation_id=request.generation_id,
        token_ids=plan.token_ids,
        messages=plan.messages,
        sampling=replace(sampling, **changed) if changed else sampling,
        response_format=request.response_format,
        adapter=adapter,
        priority=request.priority,
        cache_salt=request.caller.tenant,
        prefix_tokens=plan.prefix_tokens,
        stream=request.stream,
    )
    return work, tuple(warnings)


def _not_ready(backend: Backend) -> BackendFailure:
    if backend.state is BackendState.DEAD:
        return BackendFailure(FailureKind.ENGINE_DEAD, f"{backend.name}: the engine has died")
    return BackendFailure(
        FailureKind.BACKEND_UNAVAILABLE, f"{backend.name} is {backend.state.value}", retry_after_s=1.0
    )
