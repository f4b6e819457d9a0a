"""The sections ``admission`` and ``resume`` of a route."""

from dataclasses import replace
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from admission.values import AdmissionLimits
from gateway.config.admission import RungConfig, check_watermarks, thresholds
from gateway.config.section import Section
from resilience.resume import ResumeRules

_Ms = Annotated[float, Field(ge=0, le=3_600_000)]


class RouteAdmission(Section):
    """Admission thresholds of one route; an unset one has the value of the section ``admission``.

    Keys of a backend, not of a request (``max_in_flight``, ``aging_seconds``, ``output_quantile``,
    ``max_prefill_tokens``), cannot differ by route.

    Two keys define how the route's ``slo`` is used:

    * ``refuse_late``: a request whose first token would be later than ``ttft_ms`` is refused at once.
    * ``limit_follows``: the targets of the adaptive limit; unset: both, if the route has a ``tpot_ms``.
    """

    max_queue: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    max_wait_ms: Annotated[float, Field(gt=0, le=3_600_000)] | None = None
    max_queue_tokens: Annotated[int, Field(ge=1)] | None = None
    max_queue_bytes: Annotated[int, Field(ge=1)] | None = None
    max_input_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    kv_pressure: Annotated[float, Field(gt=0, le=1)] | None = None
    watermark_low: Annotated[float, Field(gt=0, le=1)] | None = None
    watermark_normal: Annotated[float, Field(gt=0, le=1)] | None = None
    watermark_high: Annotated[float, Field(gt=0, le=1)] | None = None
    ladder: tuple[RungConfig, ...] | None = None
    refuse_late: bool = False
    limit_follows: tuple[Literal["ttft", "tpot"], ...] | None = None

    @model_validator(mode="after")
    def _watermarks_in_order(self) -> Self:
        check_watermarks(self)
        return self


def route_limits(
    base: AdmissionLimits | None, route: RouteAdmission, *, ttft_slo_ms: float, tpot_slo_ms: float | None
) -> AdmissionLimits | None:
    """Return the thresholds of a route's requests; ``None``: the backend's own.

    Args:
        base: the thresholds of the section ``admission``.
        ttft_slo_ms: the route's target for the first token.
        tpot_slo_ms: the route's target for the time per output token; ``None``: the section's.
    """
    default = base or AdmissionLimits()
    own = thresholds(route, default)
    if route.refuse_late:
        own["first_token_within_s"] = ttft_slo_ms / 1000
    follows = route.limit_follows
    if follows is None and tpot_slo_ms is not None:
        follows = ("ttft", "tpot")
    if follows is not None:
        tpot_slo_s = default.tpot_slo_s if tpot_slo_ms is None else tpot_slo_ms / 1000
        own["tpot_slo_s"] = tpot_slo_s if "tpot" in follows else None
        own["ttft_slo_s"] = ttft_slo_ms / 1000 if "ttft" in follows else None
    return replace(default, **own) if own else base


class RouteResume(Section):
    """The route's ``resume`` section.

    Args:
        enabled: resume an answer whose backend failed in the stream.
        wait_ms: wait for a restarting engine before the next fallback target is tried, if the engine is
            expected back within this time. A request may wait two seconds in a queue, so also for a restart.
        max_wait_ms: longest wait for a restart if no target can answer; vLLM on a CPU loads in under a
            minute.
        commit_chunks: chunks of a stream that are buffered while the answer could not be resumed exactly;
            0 buffers none, so that the first token is never delayed.
        commit_ms: longest time that they are buffered; a quarter of the 200 ms target for the first token.
    """

    enabled: bool = True
    wait_ms: _Ms = 2_000
    max_wait_ms: _Ms = 60_000
    commit_chunks: Annotated[int, Field(ge=0, le=64)] = 0
    commit_ms: Annotated[float, Field(ge=0, le=1_000)] = 50


def resume_rules(route: RouteResume) -> ResumeRules:
    """Convert the section to rules in seconds; ``commit_chunks`` is 0 if nothing is buffered."""
    return ResumeRules(
        enabled=route.enabled,
        wait_s=route.wait_ms / 1000,
        max_wait_s=route.max_wait_ms / 1000,
        commit_chunks=route.commit_chunks if route.commit_ms else 0,
        commit_s=route.commit_ms / 1000,
    )


RESUME = resume_rules(RouteResume())
