"""Lists of the served models in Anthropic's and Codex's formats."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from typing_extensions import TypedDict

from gateway.contracts.model_card import ModelCard
from gateway.contracts.refusals import not_allowed, path_of

MAX_TOOL_OUTPUT: Final = 10_000
"""Most tokens of a tool's output that Codex shows the model; fewer if the context is short."""
TOOL_OUTPUT_SHARE: Final = 8  # a tool's output may fill the context's length divided by this number

CODEX_INSTRUCTIONS: Final = (
    "You are Codex, a coding agent in a terminal on the user's computer. Read files before you change them,"
    " and keep changes small. Run commands with the shell, and change files with apply_patch if you have it."
    " Follow the AGENTS.md files of the repository. Run the tests of what you changed. Go on until the task"
    " is done, then say in a few sentences what you did."
)
"""Codex uses the instructions of the model list instead of its own."""


class AnthropicModel(TypedDict):
    """Anthropic's model object."""

    type: str
    id: str
    display_name: str
    created_at: str
    lifecycle: str
    max_input_tokens: int | None
    max_tokens: int | None


class AnthropicModels(TypedDict):
    """A page of Anthropic's list; ``has_more``: whether more models follow in the requested direction."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


def anthropic_models(
    cards: Sequence[ModelCard], created: int, limit: int, after_id: str | None, before_id: str | None
) -> AnthropicModels:
    """The page after, or before, a model. Raises InvalidRequest: no such model, or both are given."""
    if after_id is not None and before_id is not None:
        raise not_allowed("before_id", "is given with after_id", "one of the two")
    ids = [card.id for card in cards]
    for name, cursor in (("after_id", after_id), ("before_id", before_id)):
        if cursor is not None and cursor not in ids:
            raise not_allowed(
                name, f"is '{path_of([cursor])}', which is not in the list", "the id of a listed model"
            )
    if before_id is not None:
        found = cards[: ids.index(before_id)]
        page = found[-limit:]
    else:
        found = cards[0 if after_id is None else ids.index(after_id) + 1 :]
        page = found[:limit]
    data = [anthropic_model(card, created) for card in page]
    ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"data": data, "has_more": len(found) > limit, "first_id": ends[0], "last_id": ends[1]}


def anthropic_model(card: ModelCard, created: int) -> AnthropicModel:
    return {
        "type": "model",
        "id": card.id,
        "display_name": card.id,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": card.max_model_len,
        "max_tokens": card.max_model_len,
    }


def codex_model(card: ModelCard, place: int) -> dict[str, Any]:
    """Codex's model object. Without one, Codex offers no apply_patch and guesses the context's length."""
    length = card.max_model_len
    output = MAX_TOOL_OUTPUT if length is None else min(MAX_TOOL_OUTPUT, length // TOOL_OUTPUT_SHARE)
    return {
        "slug": card.id,
        "display_name": card.id,
        "description": None,
        "default_reasoning_level": None,
        "supported_reasoning_levels": [],
        "shell_type": "shell_command",
        "visibility": "list",
        "supported_in_api": True,
        "priority": place,
        "upgrade": None,
        "base_instructions": CODEX_INSTRUCTIONS,
        "supports_reasoning_summaries": False,
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": "freeform",
        "truncation_policy": {"mode": "tokens", "limit": output},
        "supports_parallel_tool_calls": True,
        **({} if length is None else {"context_window": length}),
        "auto_compact_token_limit": None,
        "experimental_supported_tools": [],
        "input_modalities": ["text", "image"] if card.images else ["text"],
    }
