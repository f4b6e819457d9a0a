"""Token budgets of a prompt's sections, as given in a prompt version's file and in a model's section."""

from typing import Annotated

from pydantic import ConfigDict, Field

from budgeting.values import SectionBudgets
from gateway.config.section import Section

_Tokens = Annotated[int, Field(ge=0, le=10_000_000)]


class BudgetsSection(Section):
    """The token budget of each prompt section."""

    model_config = ConfigDict(strict=True)

    system: _Tokens = SectionBudgets().system
    retrieval: _Tokens = SectionBudgets().retrieval
    recent_turns: _Tokens = SectionBudgets().recent_turns
    older_summary: _Tokens = SectionBudgets().older_summary

    @property
    def sections(self) -> SectionBudgets:
        return SectionBudgets(**self.model_dump())
