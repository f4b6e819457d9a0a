"""The ``resume`` section of a route: whether broken answers are resumed, and how long that may wait."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from resilience.resume import ResumeRules

_Ms = Annotated[float, Field(ge=0, le=3_600_000)]


class RouteResume(BaseModel):
    """The route's ``resume`` section.

    Args:
        enabled: resume an answer whose backend broke.
        wait_ms: a backend whose engine restarts is waited for before the next leg is asked, when it is
            expected back within this. A request may wait two seconds in a queue; so it may for a restart.
        max_wait_ms: longest wait for a restart when no target can answer; vLLM on a CPU loads in under a
        minute. commit_chunks: pieces of a stream that are held back while the answer could not be resumed
        exactly. commit_ms: longest that they are held; a quarter of the target of 200 ms for the first token.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = True
    wait_ms: _Ms = 2_000
    max_wait_ms: _Ms = 60_000
    commit_chunks: Annotated[int, Field(ge=0, le=64)] = 3
    commit_ms: Annotated[float, Field(ge=0, le=1_000)] = 50


def resume_rules(route: RouteResume) -> ResumeRules:
    """The same with times in seconds; ``commit_chunks`` is 0 when nothing is held back."""
    return ResumeRules(
        enabled=route.enabled,
        wait_s=route.wait_ms / 1000,
        max_wait_s=route.max_wait_ms / 1000,
        commit_chunks=route.commit_chunks if route.commit_ms else 0,
        commit_s=route.commit_ms / 1000,
    )


RESUME = resume_rules(RouteResume())
