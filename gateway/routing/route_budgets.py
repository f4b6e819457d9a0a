"""The token budgets that a route sets."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from budgeting.values import PromptSection


@dataclass(frozen=True, slots=True)
class RouteBudgets:
    """A route's budgets; ``None`` and missing sections take the prompt version's values.

    Args:
        reserve: tokens reserved for the answer.
        spare: sections that may use the unused tokens of other sections, in order.
        max_input_tokens: tokens of the longest prompt; ``None``: as long as the model allows.
        trim_in: the contracts whose prompts may be trimmed.
    """

    sections: Mapping[PromptSection, int] = field(default_factory=dict)
    reserve: int | None = None
    spare: tuple[PromptSection, ...] | None = None
    max_input_tokens: int | None = None
    trim_in: tuple[str, ...] = ("native",)


NO_ROUTE_BUDGETS = RouteBudgets()
