"""Prompts for operators: the registered versions, and the preview of the prompt of a request."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from msgspec.structs import replace
from typing_extensions import TypedDict

from adapters.registry import AdapterRegistry
from budgeting.errors import ContextTooLong
from budgeting.plan import Offload
from budgeting.sections import SUMMARY_TITLE
from budgeting.token_ids import joined
from budgeting.values import Message, Plan, PromptSection, Role, SectionBudgets, SummaryKind
from gateway.backends.port import Backend, Fleet
from gateway.contracts.features import Feature
from gateway.contracts.fields import from_attributes
from gateway.contracts.values import GenerateRequest
from gateway.errors import InvalidRequest
from gateway.images.reading import ImageReader
from gateway.prompts.budgets import Planning, budget_request
from gateway.prompts.canonical import Canonical, Canonicalizer, stable_text
from gateway.prompts.prefixes import fingerprint_of
from gateway.prompts.published import Publishing
from gateway.prompts.text import Models
from gateway.prompts.versions import PromptVersion, PromptVersions
from gateway.routing.rank import weights_serving
from gateway.routing.revision import Revision
from gateway.routing.target import Target, resolve


class PromptNamed(TypedDict):
    """A version and the digest of its content."""

    id: str
    sha256: str


class PromptListed(PromptNamed):
    """A registered prompt version."""

    published_at: str | None
    routes: list[str]


class PromptBody(PromptListed):
    """The whole version; ``stable_text`` is the beginning of each prompt."""

    system: str
    policy: str
    grounding_rule: str
    budgets: SectionBudgets | None
    reserve: int | None
    summarizer: str
    volatile: str | None
    stable_text: str


class PreviewSection(TypedDict):
    """The tokens of a section, and its budget."""

    tokens: int
    budget: int | None


class PreviewCuts(TypedDict):
    """The chunks and turns that were dropped, shortened, merged or summarized."""

    dropped_chunks: list[str]
    cut_chunks: list[str]
    merged_chunks: list[str]
    dropped_turns: int
    summarized_turns: int


class PreviewPrefix(TypedDict):
    """The stable prefix, which other requests share."""

    tokens: int
    block_size: int
    blocks: int
    fingerprint: str | None


class PreviewFinding(TypedDict):
    """Volatile content in a caller's system message."""

    kind: str
    text: str
    sentence: str
    system_message: int
    action: str


class PreviewVolatile(TypedDict):
    """The policy for volatile content, and the findings."""

    policy: str
    findings: list[PreviewFinding]


class PreviewMessage(TypedDict):
    """A message as it would be sent, and its prompt section."""

    role: str
    content: str
    section: str


class PreviewPrompt(TypedDict):
    """The prompt as text, split where the shared prefix ends."""

    before_boundary: str
    after_boundary: str


class PreviewBody(TypedDict):
    """The prompt that would be sent, and the distribution of its tokens."""

    route: str
    prompt_version: PromptNamed | None
    max_model_len: int
    input_tokens: int
    generation_reserve: int
    sections: dict[str, PreviewSection]
    cuts: PreviewCuts
    prefix: PreviewPrefix
    volatile: PreviewVolatile
    messages: list[PreviewMessage]
    prompt: PreviewPrompt


@dataclass(frozen=True, slots=True)
class PromptAdmin:
    """Shows versions, and plans a request's prompt as the request itself would.

    ``models`` has the tokenizer and the context length of each model.
    """

    registry: PromptVersions
    publishing: Publishing
    canonicalizer: Canonicalizer
    models: Models
    images: ImageReader
    revision: Callable[[], Revision]
    fleet: Fleet
    adapters: AdapterRegistry

    def versions(self) -> list[PromptListed]:
        routes = self.revision().routes
        return [
            from_attributes(
                PromptListed,
                version,
                published_at=self.publishing.published_at(version.id),
                routes=sorted(
                    name
                    for name, route in routes.items()
                    if version.id in (route.config.prompt_version, route.config.openai_prompt_version)
                ),
            )
            for version in self.registry.all
        ]

    def version(self, version_id: str) -> PromptBody:
        """Return a version with its text as it is sent. Raises UnknownPromptVersion."""
        version = self.registry.get(version_id)
        [listed] = [one for one in self.versions() if one["id"] == version_id]
        return from_attributes(PromptBody, version, **listed, stable_text=stable_text(version))

    async def count(self, request: GenerateRequest, offload: Offload) -> int:
        """Return the prompt's tokens, as an answer's usage would report them, even if there are too many.

        Raises the other errors that the request itself would raise until its prompt is planned.
        """
        target, _, _, planning = await self._planning(request, offload)
        try:
            return (await planning.plan(self._backend(target).model)).counts.total
        except ContextTooLong as error:
            return error.needed

    async def _planning(
        self, request: GenerateRequest, offload: Offload
    ) -> tuple[Target, PromptVersion | None, Canonical, Planning]:
        """Resolve a request's names; return its target, prompt version, canonical prompt and planning."""
        target = resolve(request, self.revision(), self.fleet, self.adapters)
        version = self.registry.get(target.prompt_version) if target.prompt_version else None
        canonical = await self.canonicalizer.canonical_async(request, version, offload)
        if Feature.IMAGES in request.needs - self._backend(target).features:
            raise InvalidRequest(f"{self._backend(target).model} takes no images", param="messages")
        with self.images.of(request) as images:
            prompt = await images.read(canonical.prompt, offload)
        asked = budget_request(request, prompt, version, target.route)
        if asked.summary is SummaryKind.ENGINE:
            # The engine's summarizer would generate a summary; a preview must generate nothing.
            asked = replace(asked, summary=SummaryKind.EXTRACTIVE)
        return target, version, canonical, Planning(self.models, asked, offload)

    async def preview(self, request: GenerateRequest) -> PreviewBody:
        """Return what would be sent for this request; generates nothing and bills nothing.

        Raises the errors that the request itself would raise until its prompt is planned.
        """
        target, version, canonical, planning = await self._planning(request, asyncio.to_thread)
        backend = self._backend(target)
        model = self.models.of(backend.model)
        asked = planning.asked_of(backend.model)
        plan = await planning.plan(backend.model)
        load = backend.load
        block_size = load.block_size if load is not None and load.block_size > 0 else model.block_size
        boundary = plan.prefix_tokens
        counts = plan.counts
        return {
            "route": target.route.name,
            "prompt_version": None if version is None else from_attributes(PromptNamed, version),
            "max_model_len": model.max_model_len,
            "input_tokens": counts.total,
            "generation_reserve": plan.generation_reserve,
            "sections": {
                section.value: {
                    "tokens": getattr(counts, section.value),
                    "budget": getattr(asked.budgets, section.value, None),
                }
                for section in PromptSection
            },
            "cuts": from_attributes(PreviewCuts, plan),
            "prefix": {
                "tokens": boundary,
                "block_size": block_size,
                "blocks": boundary // block_size,
                "fingerprint": fingerprint_of(joined(plan.token_ids), boundary, block_size),
            },
            "volatile": _volatile(canonical),
            "messages": _messages(plan, canonical.prompt.system),
            "prompt": {
                "before_boundary": await asyncio.to_thread(model.tokenizer.decode, plan.token_ids[:boundary]),
                "after_boundary": await asyncio.to_thread(model.tokenizer.decode, plan.token_ids[boundary:]),
            },
        }

    def _backend(self, target: Target) -> Backend:
        """Return the backend with the highest weight, or the one that the request names."""
        weights = weights_serving(target.route, target.model, self.fleet.backends)
        return self.fleet.backends[target.backend or max(weights, key=lambda one: one[1])[0]]


def _volatile(canonical: Canonical) -> PreviewVolatile:
    findings = [
        from_attributes(PreviewFinding, one, system_message=one.message, action=canonical.action)
        for one in canonical.findings
    ]
    return {"policy": canonical.policy.value, "findings": findings}


def _messages(plan: Plan, system: Sequence[str]) -> list[PreviewMessage]:
    """Return the messages as sent to backends that take messages.

    If the chat template allows no later system message, the evidence is part of the latest user turn and is
    listed with it; the sections' token counts still separate the two.
    """
    stable = {*system, "\n\n".join(system)}
    return [
        {"role": one.role.value, "content": one.content, "section": _section(one, stable).value}
        for one in plan.messages
    ]


def _section(message: Message, stable: Collection[str]) -> PromptSection:
    if message.role is not Role.SYSTEM:
        return PromptSection.RECENT_TURNS
    if message.content in stable:
        return PromptSection.SYSTEM
    if message.content.startswith(f"{SUMMARY_TITLE}\n"):
        return PromptSection.OLDER_SUMMARY
    return PromptSection.RETRIEVAL
