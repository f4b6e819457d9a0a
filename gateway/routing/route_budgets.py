"""The token budgets that a route sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from budgeting.values import (
    PromptSection,
)


@dataclass(frozen=True, slots=True)
class RouteBudgets:
    """What a route says of budgets; ``None`` and missing sections: nothing.

    Args:
        sections: tokens by section.
        reserve: tokens kept for the answer.
        spare: sections that may use what others do not need, in order.
        max_input_tokens: the longest prompt that admission lets through.
    """

    sections: Mapping[PromptSection, int] = field(default_factory=lambda: MappingProxyType({}))
    reserve: int | None = None
    spare: tuple[PromptSection, ...] | None = None
    max_input_tokens: int | None = None


NO_ROUTE_BUDGETS = RouteBudgets()
