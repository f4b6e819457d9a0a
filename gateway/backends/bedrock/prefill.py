"""Which models complete a last message of the assistant, so that a broken answer can be resumed."""

from __future__ import annotations

# Parts of the ids of models that do, as Anthropic's and AWS's guides say: Claude up to 4.5, and Nova. Claude
# 4.6 and later refuse such a conversation ("does not support assistant message prefill"), so no family is
# named as a whole.
_KNOWN = (
    "anthropic.claude-3-",
    "anthropic.claude-opus-4-2025",
    "anthropic.claude-sonnet-4-2025",
    "anthropic.claude-opus-4-1-",
    "anthropic.claude-opus-4-5-",
    "anthropic.claude-sonnet-4-5-",
    "anthropic.claude-haiku-4-5-",
    "amazon.nova-micro",
    "amazon.nova-lite",
    "amazon.nova-pro",
    "amazon.nova-premier",
    "amazon.nova-2-lite",
)


def takes_prefill(model_id: str, configured: bool | None) -> bool:
    """Whether the model completes a last message of the assistant.

    Args:
        model_id: the model, inference profile (whose id holds the model's) or ARN.
        configured: what the operator says; ``None``: by the id, and no for an unknown one.
    """
    return any(part in model_id for part in _KNOWN) if configured is None else configured
