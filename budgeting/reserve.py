"""How many tokens an answer gets when neither the request nor the route sets a number."""

from __future__ import annotations

# The default sections take 3,400 tokens of a model length of 4,096; the answer gets the remaining 696.
DEFAULT_SECTIONS = 3400
DEFAULT_MODEL_LEN = 4096


def default_reserve(max_model_len: int, sections: int = DEFAULT_SECTIONS) -> int:
    """Tokens for the answer when neither the request nor the route sets a number.

    What the sections' budgets leave of the model's length, and at least the default share of it (17 %), so
    that a model shorter than the default length answers in proportion.

    Args:
        max_model_len: prompt and answer together, in tokens; at least 2.
        sections: tokens of all sections together.
    """
    share = max_model_len * (DEFAULT_MODEL_LEN - DEFAULT_SECTIONS) // DEFAULT_MODEL_LEN
    return min(max(max_model_len - sections, share, 1), max_model_len - 1)
