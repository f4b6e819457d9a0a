"""Which models take a cache point, and from which length on it is of use."""

from __future__ import annotations

from typing import Literal

CachePoints = Literal["auto"] | bool

# Tokens that a prefix needs to be cached, by a part of the model's id; the first match counts. From AWS's
# guide to prompt caching and Anthropic's table of minimum lengths. A shorter prefix is silently not cached.
_MINIMA = (
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
# For a model that is not in the table and that the operator says takes cache points.
DEFAULT_MINIMUM = 1024


def cacheable_from(model_id: str, cache_points: CachePoints) -> int | None:
    """Tokens from which on a stable prefix is worth a cache point; ``None``: never.

    An inference profile's id holds the model's; an application profile's ARN does not, so that ``auto`` finds
    nothing there.
    """
    if cache_points is False:
        return None
    known = next((minimum for part, minimum in _MINIMA if part in model_id), None)
    return known if known is not None or cache_points == "auto" else DEFAULT_MINIMUM
