"""What models of Bedrock can do, by their ids."""

from typing import Literal

# Fewest tokens of a cached prefix, by a part of the model's id; the first match counts. From AWS's guide to
# prompt caching and Anthropic's table of minimum lengths. A shorter prefix is silently not cached.
_CACHE_MINIMA = (
    ("anthropic.claude-opus-4-5", 4096),
    ("anthropic.claude-opus-4-6", 4096),
    ("anthropic.claude-opus-4-7", 2048),
    ("anthropic.claude-opus-4", 1024),
    ("anthropic.claude-haiku-4-5", 4096),
    ("anthropic.claude-sonnet-4", 1024),
    ("anthropic.claude-3-7-sonnet", 1024),
    ("anthropic.claude-3-5-haiku", 2048),
    ("amazon.nova-micro", 1000),
    ("amazon.nova-lite", 1000),
    ("amazon.nova-pro", 1000),
    ("amazon.nova-premier", 1000),
)
DEFAULT_MINIMUM = 1024  # for a model that is not in the table but takes cache points by the configuration

# Parts of the ids of models that complete a last message of the assistant, by Anthropic's and AWS's guides:
# Claude up to 4.5, and Nova. Later models refuse it ("does not support assistant message prefill"), so no
# family is named as a whole.
_PREFILL = (
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

# Parts of the ids of models that take schemas of answers and strict tools, by AWS's guide.
_STRUCTURED = (
    "anthropic.claude-sonnet-4-5-",
    "anthropic.claude-haiku-4-5-",
    "anthropic.claude-opus-4-5-",
    "anthropic.claude-opus-4-6-",
)


def is_claude(model_id: str) -> bool:
    """Whether the model takes a cache point after its tools, which Nova does not, and names the stop string
    that ended its answer, in a field that Converse passes on.
    """
    return "anthropic.claude" in model_id


def takes_schemas(model_id: str) -> bool:
    """Whether the model's answers and calls can be bound to a JSON schema."""
    return any(part in model_id for part in _STRUCTURED)


def cacheable_from(model_id: str, cache_points: Literal["auto"] | bool) -> int | None:
    """Tokens from which a stable prefix gets a cache point; ``None``: never.

    An inference profile's id contains the model's id, an application profile's ARN does not.
    """
    if cache_points is False:
        return None
    known = next((minimum for part, minimum in _CACHE_MINIMA if part in model_id), None)
    return known if known is not None or cache_points == "auto" else DEFAULT_MINIMUM


def takes_prefill(model_id: str, configured: bool | None) -> bool:
    """Whether the model completes a last message of the assistant; by its id when not ``configured``."""
    return any(part in model_id for part in _PREFILL) if configured is None else configured
