"""The demand of a request for admission: tokens, memory and time on one backend."""

from dataclasses import replace

from msgspec import structs

from admission.values import AdmissionLimits, Demand
from gateway.backends.port import Backend
from gateway.generation.answer_stream import AnswerStream
from gateway.generation.job import Job
from gateway.prompts.prefixes import Prefix

# Bytes of memory of a queued request per token of its prompt: its text twice, its token ids, and the objects
# around them; measured on prompts of 3,600 tokens, rounded up.
BYTES_PER_TOKEN = 64


def demand_of(job: Job, backend: Backend, stream: AnswerStream, prefix: Prefix | None = None) -> Demand:
    """Return the demand of the request on ``backend``; the stream reports the tokens generated so far.

    If the backend has computed only a part of the prefix, that part is the most it can find cached. Admission
    learns how many tokens it finds cached beyond a computed prefix.
    """
    request, plan, route = job.request, job.plan, job.target.route
    bound = prefix is not None and prefix.backend == backend.name and prefix.expected < prefix.tokens
    limits = route.limits
    if limits is not None and limits.max_input_tokens is not None:
        # The planner applies this limit, and allows longer prompts that must not be cut and fit the model.
        limits = replace(limits, max_input_tokens=None)
    tokens = plan.counts.total
    return Demand(
        backend=backend.name,
        tenant=request.caller.tenant,
        priority=request.priority,
        input_tokens=tokens,
        max_output_tokens=plan.generation_reserve * request.sampling.n,
        arrived_at=request.arrived_at,
        deadline=request.deadline,
        checked_s=request.checked_s,
        kind=(route.name, request.intent),
        cached_tokens=prefix.expected if bound and prefix is not None else None,
        size_bytes=BYTES_PER_TOKEN * tokens,
        produced=lambda: stream.tokens,
        limits=limits,
        sequences=request.sampling.n,
        open_ended=plan.open_ended,
    )


def demand_after_wait(demand: Demand, job: Job, now: float) -> Demand:
    """Return the demand of a request that has waited for its backend's engine, and has no partial answer.

    It queues like a new request, but may wait until its deadline: the limits count from its arrival, and the
    wait for the engine has used them up.
    """
    limits = replace(
        demand.limits or AdmissionLimits(),
        max_wait_s=max(job.deadline - now, 0.001),
        first_token_within_s=None,
    )
    return structs.replace(demand, deadline=job.deadline, limits=limits)


def readmission_demand(demand: Demand, job: Job, done: int, stream: AnswerStream, now: float) -> Demand:
    """Return the demand of a request that was admitted before and has ``done`` tokens of its answer.

    It queues before new requests, in the high class, for as long as the route waits for a restart; a long
    queue does not shorten its answer. A whole answer of the low class, such as a batch's line, stays low: no
    caller has a part of it, and it must not go before callers.
    """
    limits = demand.limits or AdmissionLimits()
    wait_s = min(job.target.route.resume.max_wait_s, job.deadline - now)
    input_tokens = demand.input_tokens + done
    stays_low = demand.priority < 0 and not job.request.stream
    return structs.replace(
        demand,
        priority=demand.priority if stays_low else 1,
        input_tokens=input_tokens,
        max_output_tokens=max(1, demand.max_output_tokens - done),
        deadline=None,
        # A separate kind: the length of a rest must not affect the estimate for whole answers.
        kind=(job.target.route.name, None, "rest") if done else demand.kind,
        cached_tokens=None,
        produced=lambda: max(0, stream.tokens - done),
        limits=replace(
            limits,
            max_wait_s=max(wait_s, 0.001),
            first_token_within_s=None,
            max_queue=2 * limits.max_queue,
            rungs=(),
        ),
    )
