"""The section ``resilience``: the retry budget and the detection of degenerate answers."""

from dataclasses import fields
from typing import Annotated, Self

from pydantic import Field, model_validator

from gateway.config.section import OffIsAWord, Section
from resilience.degenerate import Action, DegenerateLimits
from resilience.retry_budget import MOST, PER_SECOND, SHARE

_LIMITS = DegenerateLimits()


class ResilienceSection(Section):
    """The retry budget of a backend, the limits of a degenerate answer, and the action on one.

    ``resilience.retry_budget`` and ``resilience.degenerate`` give the reasons for the defaults.
    """

    retry_share: Annotated[float, Field(ge=0, le=1)] = SHARE
    retry_per_second: Annotated[float, Field(ge=0, le=1000)] = PER_SECOND
    retry_most: Annotated[float, Field(ge=1, le=10_000)] = MOST
    degenerate_action: Annotated[Action, OffIsAWord] = Action.RETRY
    repeat_tokens: Annotated[int, Field(ge=2, le=100_000)] = _LIMITS.repeat_tokens
    cycle_tokens: Annotated[int, Field(ge=2, le=100_000)] = _LIMITS.cycle_tokens
    cycle_length: Annotated[int, Field(ge=1, le=64)] = _LIMITS.cycle_length
    replacement_chars: Annotated[int, Field(ge=0, le=1000)] = _LIMITS.replacement_chars
    replacement_window: Annotated[int, Field(ge=1, le=1000)] = _LIMITS.replacement_window

    @model_validator(mode="after")
    def _limits_fit(self) -> Self:
        self.limits()
        return self

    def limits(self) -> DegenerateLimits:
        """Return the limits of a degenerate answer. Raises ValueError if they contradict each other."""
        return DegenerateLimits(**{one.name: getattr(self, one.name) for one in fields(DegenerateLimits)})
