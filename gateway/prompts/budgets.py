"""Which token budgets hold for a request.

A key that the route's configuration sets wins over the same key of the prompt version, and that over the
default. On OpenAI's paths budgets trim only where the route's ``trim_in`` names them or the caller asks
for it (``truncation: auto``). The caller's
``max_tokens`` wins over every reserve, in the planner.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace

from msgspec import structs

from budgeting.errors import BudgetError
from budgeting.values import SPARE_ORDER, BudgetRequest, CanonicalPrompt, Plan, SectionBudgets, SummaryKind
from gateway.contracts.values import Contract, GenerateRequest
from gateway.prompts.versions import PromptVersion
from gateway.routing.route_budgets import NO_ROUTE_BUDGETS, RouteBudgets

# With ``truncation: auto`` and no budgets the oldest turns go, and only where the model's length demands it.
TRUNCATED = SectionBudgets(recent_turns=10**9, older_summary=0)


def budget_request(
    request: GenerateRequest,
    prompt: CanonicalPrompt,
    version: PromptVersion | None,
    route: RouteBudgets = NO_ROUTE_BUDGETS,
) -> BudgetRequest:
    """The planner's input; nothing is trimmed where neither the route nor the prompt version has budgets."""
    contract = "native" if request.contract is Contract.NATIVE else "openai"
    budgets = version.budgets if version is not None else None
    if route.sections:
        own = {section.value: tokens for section, tokens in route.sections.items()}
        budgets = replace(budgets or SectionBudgets(), **own)
    if request.truncate and budgets is None:
        budgets = TRUNCATED
    reserve = route.reserve
    if reserve is None and version is not None:
        reserve = version.reserve
    return BudgetRequest(
        prompt=prompt,
        max_tokens=request.sampling.max_tokens,
        budgets=budgets if contract in route.trim_in or request.truncate else None,
        reserve=reserve,
        spare=SPARE_ORDER if route.spare is None else route.spare,
        summary=version.summarizer if version is not None else SummaryKind.EXTRACTIVE,
        max_input_tokens=route.max_input_tokens,
        owner=request.caller.cache_salt,
    )


async def half_plan(
    make_plan: Callable[[BudgetRequest], Awaitable[Plan]], asked: BudgetRequest, plan: Plan
) -> Plan | None:
    """The same prompt planned in half the tokens of ``plan``; ``None`` where nothing (more) may be cut."""
    if asked.budgets is None:
        return None
    try:
        half = await make_plan(structs.replace(asked, max_input_tokens=plan.counts.total // 2))
    except BudgetError:
        return None
    return half if half.counts.total < plan.counts.total else None
