"""The section ``resilience``: the retry budget, and degenerate answers."""

from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from gateway.config.section import Section
from resilience.degenerate import Action, DegenerateLimits
from resilience.retry_budget import MOST, PER_SECOND, SHARE

_LIMITS = DegenerateLimits()


class ResilienceSection(Section):
    """How many retries a backend is given, and when an answer has become nonsense and what is done then.

    Reasons for the defaults stand in ``resilience.retry_budget`` and ``resilience.degenerate``.
    """

    retry_share: Annotated[float, Field(ge=0, le=1)] = SHARE
    retry_per_second: Annotated[float, Field(ge=0, le=1000)] = PER_SECOND
    retry_most: Annotated[float, Field(ge=1, le=10_000)] = MOST
    degenerate_action: Action = Action.RETRY
    repeat_tokens: Annotated[int, Field(ge=2, le=100_000)] = _LIMITS.repeat_tokens
    cycle_tokens: Annotated[int, Field(ge=2, le=100_000)] = _LIMITS.cycle_tokens
    cycle_length: Annotated[int, Field(ge=1, le=64)] = _LIMITS.cycle_length
    replacement_chars: Annotated[int, Field(ge=0, le=1000)] = _LIMITS.replacement_chars
    replacement_window: Annotated[int, Field(ge=1, le=1000)] = _LIMITS.replacement_window

    @field_validator("degenerate_action", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: object) -> object:
        """YAML reads a bare ``off`` as false."""
        return "off" if value is False else value

    @model_validator(mode="after")
    def _limits_fit(self) -> Self:
        """The limits fit each other."""
        self.limits()
        return self

    def limits(self) -> DegenerateLimits:
        """When an answer has become nonsense.

        Raises:
            ValueError: the limits do not fit each other.
        """
        return DegenerateLimits(
            repeat_tokens=self.repeat_tokens,
            cycle_tokens=self.cycle_tokens,
            cycle_length=self.cycle_length,
            replacement_chars=self.replacement_chars,
            replacement_window=self.replacement_window,
        )
