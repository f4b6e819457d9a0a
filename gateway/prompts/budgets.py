"""Determines the token budgets of a request.

A key of the route's configuration overrides that of the prompt version, which overrides the default. A
model's own budgets apply if neither has budgets. On OpenAI's paths budgets trim only if the route's
``trim_in`` names OpenAI or the caller requests it (``truncation: auto``). The caller's ``max_tokens``
overrides every reserve, in the planner.
"""

from contextlib import suppress
from dataclasses import replace
from typing import Final

from msgspec import Struct, structs

from budgeting.errors import BudgetError, TemplateRefused
from budgeting.plan import Offload
from budgeting.values import BudgetRequest, CanonicalPrompt, Plan, SectionBudgets, SummaryKind
from gateway.contracts.values import NATIVE, Contract, GenerateRequest
from gateway.prompts.text import Models, ModelText
from gateway.prompts.versions import PromptVersion
from gateway.routing.revision import Route

# With ``truncation: auto`` and no budgets, the oldest turns are cut, and only to fit the context length.
TRUNCATED = SectionBudgets(recent_turns=10**9, older_summary=0)


def budget_request(
    request: GenerateRequest,
    prompt: CanonicalPrompt,
    version: PromptVersion | None,
    route: Route,
) -> BudgetRequest:
    """Return the planner's input; nothing is trimmed if neither the route nor the prompt version has budgets.

    :class:`Planning` adds a model's own budgets later.
    """
    budgets = version.budgets if version is not None else None
    if route.budgets:
        budgets = replace(budgets or SectionBudgets(), **route.budgets)
    if request.truncate and budgets is None:
        budgets = TRUNCATED
    contract = "native" if request.contract is NATIVE else "openai"
    trims = contract in route.config.trim_in or request.truncate
    reserve, limits = route.config.reserve, route.limits
    if reserve is None and version is not None:
        reserve = version.reserve
    return BudgetRequest(
        prompt=prompt,
        max_tokens=request.sampling.max_tokens,
        budgets=budgets if trims else None,
        reserve=reserve,
        spare=route.spare,
        summary=version.summarizer if version is not None else SummaryKind.EXTRACTIVE,
        max_input_tokens=None if limits is None else limits.max_input_tokens,
        owner=request.caller.cache_salt,
        lenient=request.contract is Contract.MESSAGES,
        trims=trims,
    )


EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def nearest_efforts(effort: str) -> list[str]:
    """Return the other efforts, nearest first, the smaller of two first; ``none`` replaces no other."""
    if effort not in EFFORTS:
        return []
    place = EFFORTS.index(effort)
    others = sorted(enumerate(EFFORTS), key=lambda one: (abs(one[0] - place), one[0]))
    return [name for _, name in others if name not in (effort, "none")]


class Planning(Struct, frozen=True):
    """One request's prompt, which is planned separately for each model that may answer."""

    models: Models
    asked: BudgetRequest
    offload: Offload

    def asked_of(self, model: str) -> BudgetRequest:
        """Return the planner's input for ``model``, with the model's own budgets if there are no others."""
        own = self.models.budgets(model) if self.asked.trims else None
        if own is None or self.asked.budgets not in (None, TRUNCATED):
            return self.asked
        return structs.replace(self.asked, budgets=own)

    async def plan(self, model: str) -> Plan:
        """Plan the prompt as it is sent to ``model``. Raises BudgetError."""
        text, asked = self.models.of(model), self.asked_of(model)
        effort = asked.prompt.template_kwargs.get("reasoning_effort") if asked.lenient else None
        if not isinstance(effort, str):
            return await text.planner.plan_async(asked, offload=self.offload)
        taken = text.efforts.get(effort)
        try:
            return await self._with_effort(text, asked, taken or effort)
        except TemplateRefused as refused:
            for near in nearest_efforts(effort):
                with suppress(TemplateRefused):
                    plan = await self._with_effort(text, asked, near)
                    text.efforts[effort] = near
                    return plan
            raise refused

    async def _with_effort(self, text: ModelText, asked: BudgetRequest, effort: str) -> Plan:
        prompt = asked.prompt
        if effort == prompt.template_kwargs["reasoning_effort"]:
            return await text.planner.plan_async(asked, offload=self.offload)
        kwargs = {**prompt.template_kwargs, "reasoning_effort": effort}
        asked = structs.replace(asked, prompt=structs.replace(prompt, template_kwargs=kwargs))
        plan = await text.planner.plan_async(asked, offload=self.offload)
        return structs.replace(plan, reasoning_effort=effort)

    async def half(self, model: str, plan: Plan) -> Plan | None:
        """Plan the prompt in half the tokens of ``plan``; ``None`` if nothing more may be cut."""
        asked = self.asked_of(model)
        if asked.budgets is None:
            return None
        asked = structs.replace(asked, max_input_tokens=plan.counts.total // 2)
        try:
            half = await structs.replace(self, asked=asked).plan(model)
        except BudgetError:
            return None
        return half if half.counts.total < plan.counts.total else None

    def alike(self, one: str, other: str) -> bool:
        """Whether a plan for one model is valid for the other: same tokenizer, length and budgets."""
        models = self.models
        return models.of(one) is models.of(other) and models.budgets(one) == models.budgets(other)
