"""Pairs of a series and a question that the generator never asks, kept back for the evaluation."""

from __future__ import annotations

# The facts themselves can be learned: other kinds of answers ("what is X about?") contain them.
_PAIRS = frozenset(
    {
        ("Berserk", "author"),
        ("Monster", "volumes"),
        ("Naruto", "author"),
        ("Death Note", "volumes"),
        ("Fullmetal Alchemist", "author"),
        ("Slam Dunk", "author"),
        ("Akira", "volumes"),
        ("One Piece", "author"),
        ("Parasyte", "genre"),
        ("Frieren", "author"),
        ("Inuyasha", "volumes"),
        ("Golden Kamuy", "genre"),
        ("Pluto", "volumes"),
        ("Fairy Tail", "genre"),
        ("Fruits Basket", "genre"),
        ("Spy x Family", "genre"),
        ("Vagabond", "author"),
        ("Haikyu", "genre"),
    }
)


def is_held_out(title: str, kind: str) -> bool:
    """Return whether only the evaluation asks a (title, kind) pair, in either language."""
    return (title, kind) in _PAIRS


def held_out_pairs() -> frozenset[tuple[str, str]]:
    """Every held-out pair."""
    return _PAIRS
