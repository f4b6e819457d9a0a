"""Fakes of operators' services, and a wait for a condition in another thread."""

from __future__ import annotations

import time
from collections.abc import Callable

from budgeting.plan import Offload
from budgeting.values import SectionBudgets
from gateway.admin.admission import AdmissionBody
from gateway.admin.prompts import PreviewBody, PromptBody, PromptListed
from gateway.contracts.values import Caller, CallerRole, GenerateRequest
from gateway.errors import UnknownPromptVersion
from gateway.http.exchange import Exchange
from gateway.testing import fake_services


class FakePrompts:
    """Prompts with one version, ``v1``; a preview shows the request's contract and messages."""

    def versions(self) -> list[PromptListed]:
        """The only version."""
        return [{"id": "v1", "sha256": "0" * 64, "published_at": None, "routes": []}]

    def version(self, version_id: str) -> PromptBody:
        """The version ``v1``. Raises UnknownPromptVersion for any other."""
        if version_id != "v1":
            raise UnknownPromptVersion("known: v1", param="prompt_version")
        return {
            **self.versions()[0],
            "system": "Hi.",
            "policy": "",
            "grounding_rule": "",
            "budgets": SectionBudgets(),
            "reserve": None,
            "summarizer": "none",
            "volatile": None,
            "stable_text": "Hi.",
        }

    async def count(self, request: GenerateRequest, offload: Offload) -> int:
        """The number of characters of the messages."""
        return sum(len(one.content) for one in request.messages)

    async def preview(self, request: GenerateRequest) -> PreviewBody:
        """A preview with the contract's name as the route, and the messages."""
        return {
            "route": request.contract.value,
            "prompt_version": None,
            "max_model_len": 4096,
            "input_tokens": 0,
            "generation_reserve": 0,
            "sections": {},
            "cuts": {
                "dropped_chunks": [],
                "cut_chunks": [],
                "merged_chunks": [],
                "dropped_turns": 0,
                "summarized_turns": 0,
            },
            "prefix": {"tokens": 0, "block_size": 16, "blocks": 0, "fingerprint": None},
            "volatile": {"policy": "off", "findings": []},
            "messages": [
                {"role": one.role.value, "content": one.content, "section": "recent_turns"}
                for one in request.messages
            ],
            "prompt": {"before_boundary": "", "after_boundary": ""},
        }


class FakeAdmission:
    """The admission of an idle gateway."""

    def show(self) -> AdmissionBody:
        """Admission without gates and decisions."""
        return {"backends": {}, "limits": {"default": {}, "routes": {}}, "decisions": []}


def eventually(condition: Callable[[], bool], *, within_s: float = 60.0) -> None:
    """Block until ``condition`` holds in the server's thread. Raises AssertionError after ``within_s``."""
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError("it did not happen in time")
        time.sleep(0.002)


def exchange_of(tenant: str) -> Exchange:
    """The exchange of a tenant's request, which sends nothing."""

    async def send(message: object) -> None:
        """Send nothing."""

    exchange = Exchange.open({"headers": []}, send, fake_services())
    exchange.caller = Caller(tenant, CallerRole.CALLER, "key")
    return exchange
