"""How many tokens an answer gets when nobody says."""

from __future__ import annotations

# Seed 000 §11: the sections take 3,400 of 4,096 tokens, the answer gets the remaining 696.
SEED_SECTIONS = 3400
SEED_MODEL_LEN = 4096


def default_reserve(max_model_len: int) -> int:
    """Tokens for the answer when nobody says how many.

    What the seed's sections leave of the model's length, and at least the seed's share of it (17 %), so
    that models shorter than the seed's answer in proportion.
    """
    share = max_model_len * (SEED_MODEL_LEN - SEED_SECTIONS) // SEED_MODEL_LEN
    return max(max_model_len - SEED_SECTIONS, share, 1)
