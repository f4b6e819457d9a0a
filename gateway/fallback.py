"""The fallback chain: gentler answers when admission or the backend keeps a request from its backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from adapters.registry import Lease
from admission.controller import AdmissionController
from admission.errors import Refused
from budgeting.values import Plan
from gateway.backends.port import Backend, Completion, Delta
from gateway.contracts.values import Answer, Fallback, FinishReason, GenerateRequest, Usage
from gateway.dispatch import Dispatcher, Outcome
from gateway.meter import Meter
from gateway.routing.revision import DEGRADED, RESPONSE_CACHE
from gateway.routing.target import Target
from gateway.stages import demand_of, must_honour
from resilience.failures import BackendFailure
from resilience.response_cache import ResponseCache, cache_key


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """An answer that may be given again when nothing better can be had."""

    text: str
    finish_reason: FinishReason


class FallbackChain:
    """Walks a route's legs until one answers."""

    def __init__(
        self,
        *,
        cache: ResponseCache[CachedAnswer],
        admission: AdmissionController,
        dispatcher: Dispatcher,
        backends: Mapping[str, Backend],
    ) -> None:
        self._cache = cache
        self._admission = admission
        self._dispatcher = dispatcher
        self._backends = backends

    async def answer(
        self,
        cause: Refused | BackendFailure,
        *,
        request: GenerateRequest,
        target: Target,
        plan: Plan,
        lease: Lease,
        primary: Backend,
        meter: Meter,
    ) -> Outcome:
        """Answer by the first leg that can; re-raise ``cause`` when none can or none may.

        None may when the caller wants errors, when bytes of an answer are already out, or when the fault
        lies in the request itself: bad input is never answered by a fallback.
        """
        if not request.allow_fallback or meter.delivered or not _other_may_help(cause):
            raise cause
        reason = cause.reason.value if isinstance(cause, Refused) else cause.kind.value
        retry_after_ms = None if cause.retry_after_s is None else max(1, round(cause.retry_after_s * 1000))
        for leg in target.route.fallback:
            if leg == RESPONSE_CACHE:
                cached = self._cache.get(_key(request, target, plan, lease))
                if cached is not None:
                    fallback = Fallback(RESPONSE_CACHE, reason, retry_after_ms)
                    return await _give(
                        cached.text, cached.finish_reason, RESPONSE_CACHE, primary, fallback, meter
                    )
            elif leg == DEGRADED:
                fallback = Fallback("degraded_response", reason, retry_after_ms)
                return await _give(
                    target.route.degraded_text, FinishReason.DEGRADED, DEGRADED, primary, fallback, meter
                )
            elif leg != primary.name:
                other = self._backends[leg]
                outcome = await self._other(other, request, target, plan, lease, meter)
                if outcome is not None:
                    return replace(outcome, fallback=Fallback(leg, reason, retry_after_ms))
        raise cause

    def remember(
        self, request: GenerateRequest, target: Target, plan: Plan, lease: Lease, answer: Answer
    ) -> None:
        """Keep a whole, undegraded answer for the day when nothing better can be had."""
        whole = answer.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        plain = answer.logprobs is None and not answer.others  # the cache keeps one text
        if whole and plain and answer.fallback is None and RESPONSE_CACHE in target.route.fallback:
            self._cache.put(
                _key(request, target, plan, lease), CachedAnswer(answer.output_text, answer.finish_reason)
            )

    async def _other(
        self,
        backend: Backend,
        request: GenerateRequest,
        target: Target,
        plan: Plan,
        lease: Lease,
        meter: Meter,
    ) -> Outcome | None:
        if must_honour(request, lease) - backend.features:
            return None
        try:
            demand = demand_of(request, plan, backend, meter, target.route)
            async with self._admission.admit(demand) as slot:
                return await self._dispatcher.generate(slot, backend, request, plan, lease.adapter, meter)
        except (Refused, BackendFailure):
            # The next leg may still answer; the guard and admission have told what failed here.
            if meter.delivered:
                raise
            return None


def _other_may_help(cause: Refused | BackendFailure) -> bool:
    return isinstance(cause, Refused) or cause.policy.other_backend


async def _give(
    text: str, finish: FinishReason, kind: str, primary: Backend, fallback: Fallback, meter: Meter
) -> Outcome:
    await meter.take(Delta(text, 0))
    return Outcome(
        completion=Completion(finish, Usage()),
        backend=kind,
        backend_name=kind,
        model=primary.model,
        fallback=fallback,
    )


def _key(request: GenerateRequest, target: Target, plan: Plan, lease: Lease) -> str:
    # The prompt's token ids hold the personal context as well, so no answer reaches another context.
    return cache_key(
        tenant=request.caller.tenant,
        model=request.model or target.route.name,
        adapter_id=lease.adapter.adapter_id if lease.adapter else None,
        prompt_version=target.prompt_version,
        token_ids=plan.token_ids,
        sampling_repr=repr((request.sampling, request.response_format)),
    )
