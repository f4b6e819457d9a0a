"""How many tokens an answer gets when nobody says."""

from __future__ import annotations

# Seed 000 §11: the sections take 3,400 of 4,096 tokens, the answer gets the remaining 696.
SEED_SECTIONS = 3400
SEED_MODEL_LEN = 4096


def default_reserve(max_model_len: int, sections: int = SEED_SECTIONS) -> int:
    """Tokens for the answer when nobody says how many.

    What the sections' budgets leave of the model's length, and at least the seed's share of it (17 %), so
    that models shorter than the seed's answer in proportion.

    Args:
        max_model_len: prompt and answer together, in tokens; at least 2.
        sections: tokens of all sections together.
    """
    share = max_model_len * (SEED_MODEL_LEN - SEED_SECTIONS) // SEED_MODEL_LEN
    return min(max(max_model_len - sections, share, 1), max_model_len - 1)
