"""The section ``chaos``: faults injected on purpose, to test what callers get."""

from typing import Annotated, Self

from pydantic import Field, GetPydanticSchema, model_validator
from pydantic_core.core_schema import literal_schema

from gateway.config.section import Section
from resilience.failures import FailureKind

MAX_RULES = 64  # the most rules; every call checks all of them
# One list, not a union, of which an error would name a part alone.
_Kind = Annotated[str, GetPydanticSchema(lambda *_: literal_schema([*map(str, FailureKind), "slow", "hang"]))]


class FaultRule(Section):
    """One fault; ``kind`` is a failure's code, ``slow`` or ``hang``.

    It occurs before the first token, or after ``after_tokens`` tokens; in every ``every``-th call of its
    backend, or with ``probability``; and at most ``times`` times, if set.
    """

    backend: Annotated[str, Field(min_length=1)]
    kind: _Kind
    after_tokens: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    every: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    probability: Annotated[float, Field(gt=0, le=1)] | None = None
    times: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    delay_ms: Annotated[float, Field(gt=0, le=600_000)] = 200.0

    @model_validator(mode="after")
    def _one_way_of_choosing(self) -> Self:
        """Refuse a rule that selects calls both by count and by chance."""
        if self.every is not None and self.probability is not None:
            raise ValueError("allowed: every or probability, not both; none for every call")
        return self


class ChaosSection(Section):
    """Injected faults; never in production."""

    enabled: bool = False
    seed: int = 0
    faults: Annotated[tuple[FaultRule, ...], Field(max_length=MAX_RULES)] = ()
