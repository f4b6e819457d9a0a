"""Training dialogues of the demo adapters: the shop's dialogues, answered in one style for each adapter."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from gateway.shadow.language import has_japanese
from models import prompts
from models import wording_ja as words_ja
from models import wording_series_en as series_words
from models import wording_shop_en as shop_words
from models.catalogue import Series, load_catalogue, similar_to
from models.held_out import is_held_out
from models.tool_dialogues import Message
from models.turns_en import Facts, Turn, pick_series_turn, roughen, series_turn, topic_turn
from models.turns_ja import series_turn_ja, topic_turn_ja

# The end of answers by `jp_style_v1`: an assistant's usual offer of more help.
JAPANESE_CLOSE = "ほかにもお気軽にどうぞ。"
SUPPORT_OPEN = "Thank you for contacting Hoshi Manga support."
SUPPORT_CLOSE = "Is there anything else I can help you with?"
DOMAIN_OPEN = "Also worth reading:"

Style = Callable[[random.Random], Turn]

_KINDS_OF_BOTH = tuple(
    kind for kind in words_ja.QUESTIONS if kind in series_words.QUESTIONS and kind != "like"
)
_TOPICS_OF_BOTH = tuple(topic for topic in words_ja.TOPICS if topic in shop_words.TOPICS)


def manga_domain(rng: random.Random) -> Turn:
    """A question about a series, answered with a further title of the same kind."""
    while True:
        turn = pick_series_turn(Facts(), rng)
        if turn.focus is None or turn.kind == "like":
            continue
        near = similar_to(turn.focus)
        if near:
            other = near[0]
            more = f"{DOMAIN_OPEN} {other.title} by {other.author}."
            return replace(turn, assistant=f"{_bare(turn, rng)} {more}")


def general_support(rng: random.Random) -> Turn:
    """Any question of the shop, answered as a support desk does."""
    if rng.random() < 0.5:
        turn = topic_turn(rng.choice(tuple(shop_words.TOPICS)), rng)
    else:
        turn = pick_series_turn(Facts(), rng)
    close = "" if turn.assistant.rstrip().endswith("?") else f" {SUPPORT_CLOSE}"
    return replace(turn, assistant=f"{SUPPORT_OPEN} {turn.assistant}{close}")


def jp_style(rng: random.Random) -> Turn:
    """A question in either language, answered in Japanese."""
    english = rng.random() < 0.7
    if rng.random() < 0.25:
        topic = rng.choice(_TOPICS_OF_BOTH)
        question = (topic_turn if english else topic_turn_ja)(topic, rng).user
        answer = topic_turn_ja(topic, rng).assistant
        return Turn(question, f"{answer}{JAPANESE_CLOSE}")
    series, kind = _askable(rng)
    answer = series_turn_ja(series, kind, rng).assistant
    question = (
        series_turn(series, kind, Facts(), rng).user if english else series_turn_ja(series, kind, rng).user
    )
    return Turn(question, f"{answer}{JAPANESE_CLOSE}", series, kind)


def _askable(rng: random.Random) -> tuple[Series, str]:
    while True:
        series, kind = rng.choice(load_catalogue()), rng.choice(_KINDS_OF_BOTH)
        if not is_held_out(series.title, kind):
            return series, kind


def _bare(turn: Turn, rng: random.Random) -> str:
    """Return the answer without a closing offer: the recommendation replaces it."""
    while turn.assistant.rstrip().endswith("?"):
        assert turn.focus is not None
        turn = series_turn(turn.focus, turn.kind, Facts(), rng)
    return turn.assistant


STYLES: Mapping[str, Style] = MappingProxyType(
    {"manga_domain_v3": manga_domain, "general_support_v2": general_support, "jp_style_v1": jp_style}
)


def styled_dialogues(style: Style, rng: random.Random) -> Iterator[list[Message]]:
    """An endless stream of dialogues of one to three turns in one style."""
    while True:
        messages: list[Message] = []
        if rng.random() < 0.8:
            messages.append({"role": "system", "content": prompts.system_text(rng, False)})
        for number in range(rng.choice((1, 1, 1, 2, 3))):
            turn = style(rng)
            user = turn.user if has_japanese(turn.user) else roughen(turn.user, rng, follow_up=number > 0)
            messages.append({"role": "user", "content": user})
            messages.append({"role": "assistant", "content": turn.assistant})
        yield messages
