"""Whole training dialogues: prompt surroundings plus one to six turns, drawn from an injected generator."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from models import prompts
from models import wording_delivery_en as delivery_words
from models import wording_ja as words_ja
from models import wording_series_en as series_words
from models import wording_shop_en as shop_words
from models.catalogue import Series, load_catalogue
from models.held_out import is_held_out
from models.invent import CARRIERS, WEEKDAYS, invented_price, invented_series
from models.tool_dialogues import Message, tool_dialogue
from models.turns_en import (
    Facts,
    Turn,
    delivery_turn,
    genre_turn,
    order_turn,
    pick_series_turn,
    roughen,
    series_turn,
    topic_turn,
    unknown_turn,
)
from models.turns_ja import (
    genre_turn_ja,
    other_turn_ja,
    pick_series_turn_ja,
    roughen_ja,
    series_turn_ja,
    topic_turn_ja,
)

_TURN_COUNTS = (1, 2, 3, 4, 5, 6)
_TURN_WEIGHTS = (34, 26, 18, 10, 7, 5)
_SMALL_TALK = ("greet", "thanks", "bye", "who", "off_topic", "start")


@dataclass(frozen=True)
class Mix:
    """Shares of the kinds of dialogues: with catalogue evidence, Japanese, with a long prompt, with tools.

    ``topics`` scales how often a question without evidence is about the shop instead of a series.
    """

    evidence: float = 0.42
    japanese: float = 0.2
    long: float = 0.04
    topics: float = 1.0
    tools: float = 0.15


# The second mix is used after the first: a small model takes longest to learn answers from the prompt.
MIXES: dict[str, Mix] = {
    "general": Mix(),
    "grounded": Mix(evidence=0.62, japanese=0.24, long=0.02, topics=0.6),
    "tools": Mix(evidence=0.5, japanese=0.22, long=0.01, topics=0.7, tools=0.5),
}


def _overridden(series: Series, rng: random.Random) -> Series:
    """Return a known series as evidence describes it: often with another price, stock level or length."""
    if rng.random() < 0.5:
        return series
    return replace(
        series,
        price=invented_price(rng),
        stock=rng.choice(("in", "low", "out", "pre")),
        volumes=rng.randint(1, 90) if rng.random() < 0.5 else series.volumes,
    )


def _series_evidence(rng: random.Random, japanese: bool, count: int) -> tuple[Facts, list[str]]:
    """Catalogue lines of ``count`` series, two thirds of them invented."""
    pool: dict[str, Series] = {}
    for _ in range(count):
        known = rng.random() < 0.35
        series = _overridden(rng.choice(load_catalogue()), rng) if known else invented_series(rng)
        pool[series.title] = series
    chosen = tuple(pool.values())
    lines = [prompts.catalogue_line(series, rng, japanese) for series in chosen]
    # A publisher counts as listed only when every line that a question may be about names one.
    listed = all(series.publisher in line for series, line in zip(chosen, lines, strict=True))
    unlisted = not any(series.publisher in line for series, line in zip(chosen, lines, strict=True))
    if not listed and not unlisted:
        keep = [(s, line) for s, line in zip(chosen, lines, strict=True) if s.publisher in line]
        chosen, lines, listed = tuple(s for s, _ in keep), [line for _, line in keep], True
    return Facts(series=chosen, publisher_listed=listed), lines


def _shop_evidence(rng: random.Random) -> tuple[Facts, list[str]]:
    """Policy lines with delivery times or the state of an order, none of which the model can know."""
    if rng.random() < 0.5:
        places = [place for _, _, zone in delivery_words.ZONES.values() for place in zone]
        delivery = {}
        lines = []
        for place in rng.sample(places, rng.randint(1, 3)):
            low = rng.randint(1, 14)
            days, cost = f"{low}-{low + rng.randint(1, 6)}", invented_price(rng)
            delivery[place] = (days, cost)
            lines.append(
                rng.choice(
                    (
                        (
                            f"[policy shipping] Delivery to {place} takes {days} business days and costs"
                            f" {cost} EUR"
                        ),
                        f"[policy {rng.randint(1, 99)}] {place}: {days} business days, {cost} EUR",
                        f"[shipping] {place} | {days} days | {cost} EUR",
                    )
                )
            )
        return Facts(delivery=delivery), lines
    order = str(rng.randint(1000, 999999))
    day, eta = rng.choice(WEEKDAYS), rng.choice(WEEKDAYS)
    if rng.random() < 0.7:
        carrier = rng.choice(CARRIERS)
        line = rng.choice(
            (
                f"[order {order}] shipped on {day} with {carrier}, expected on {eta}",
                f"[order {order}] status: shipped; date: {day}; carrier: {carrier}; arrival: {eta}",
            )
        )
        return Facts(shipped={order: (day, carrier, eta)}), [line]
    return Facts(packing={order: day}), [f"[order {order}] status: packing, ships on {day}"]


def _first_turn(
    facts: Facts, rng: random.Random, japanese: bool, customer: str | None, topics: float = 1.0
) -> Turn:
    """Return a turn that needs no earlier turn."""
    draw = rng.random()
    if facts.delivery and draw < 0.85:
        return delivery_turn(facts, rng)
    if (facts.shipped or facts.packing) and draw < 0.85:
        return order_turn(facts, rng)
    if facts.series and draw < 0.85:
        if japanese:
            return pick_series_turn_ja(facts, rng)
        return genre_turn(facts, rng) if rng.random() < 0.15 else pick_series_turn(facts, rng)
    bare = Facts()
    draw = rng.random()
    if japanese:
        if draw < 0.5 * topics:
            return topic_turn_ja(rng.choice(tuple(words_ja.TOPICS)), rng)
        if draw < 0.5 * topics + 0.1:
            return genre_turn_ja(rng)
        return (
            other_turn_ja(rng)
            if draw < 0.5 * topics + 0.2 or facts.series
            else pick_series_turn_ja(bare, rng)
        )
    shop = 0.3 * topics
    if draw < shop:
        return topic_turn(rng.choice(tuple(shop_words.TOPICS)), rng, customer)
    if draw < shop + 0.08:
        return topic_turn(rng.choice(_SMALL_TALK), rng, customer)
    if draw < shop + 0.16:
        return delivery_turn(bare, rng) if not facts.delivery else topic_turn("returns", rng)
    if draw < shop + 0.21:
        return order_turn(bare, rng) if not (facts.shipped or facts.packing) else topic_turn("cancel", rng)
    if draw < shop + 0.26 or (facts.series and draw < shop + 0.48):
        return unknown_turn(rng)
    if facts.series:
        turn = pick_series_turn(bare, rng)
        listed = {series.title for series in facts.series}
        return turn if turn.focus and turn.focus.title not in listed else unknown_turn(rng)
    return genre_turn(bare, rng) if draw < shop + 0.38 else pick_series_turn(bare, rng)


def _follow_up(last: Turn, facts: Facts, rng: random.Random, japanese: bool) -> Turn | None:
    """Return a turn that refers to the last one ("and how many volumes does it have?"), if possible."""
    if last.kind == "delivery" and not japanese:
        return delivery_turn(facts if facts.delivery else Facts(), rng, follow_up=True)
    focus = last.focus
    if focus is None:
        return None
    table = words_ja.QUESTIONS if japanese else series_words.QUESTIONS
    kinds = [kind for kind in table if kind != last.kind and not is_held_out(focus.title, kind)]
    if facts.series:
        kinds = [kind for kind in kinds if kind not in ("about", "like")]
    if japanese:
        return series_turn_ja(focus, rng.choice(kinds), rng, pronoun=True)
    swap = rng.random() < 0.2 and last.kind in ("author", "volumes", "price", "stock", "status")
    if swap:
        pool = [
            series for series in facts.series or load_catalogue() if not is_held_out(series.title, last.kind)
        ]
        if pool:
            other = rng.choice(pool)
            answer = series_turn(other, last.kind, facts, rng).assistant
            question = rng.choice(("what about {t}?", "and {t}?", "how about {t}?")).format(t=other.title)
            return Turn(question, answer, other, last.kind)
    return series_turn(focus, rng.choice(kinds), facts, rng, pronoun=True)


def make_dialogue(rng: random.Random, mix: Mix | None = None) -> list[Message]:
    """One dialogue in one of the service's prompt shapes."""
    mix = mix or MIXES["general"]
    if rng.random() < mix.tools:
        count = rng.choices(_TURN_COUNTS[:3], _TURN_WEIGHTS[:3])[0]
        others = [_first_turn(Facts(), rng, japanese=False, customer=None) for _ in range(count)]
        system = prompts.system_text(rng, False) if rng.random() < 0.4 else None
        return tool_dialogue(rng, [replace(turn, user=roughen(turn.user, rng)) for turn in others], system)
    long = rng.random() < mix.long
    japanese = rng.random() < mix.japanese
    facts, lines = Facts(), list[str]()
    draw = rng.random()
    if long and draw < 0.6:
        facts, lines = _series_evidence(rng, japanese, rng.randint(4, 16))
    elif draw < mix.evidence:
        facts, lines = _series_evidence(rng, japanese, rng.choice((1, 1, 2, 2, 3, 4, 5)))
    elif draw < mix.evidence + 0.08 and not japanese:
        facts, lines = _shop_evidence(rng)
    customer = prompts.customer_name(rng) if rng.random() < 0.5 else None
    context = prompts.context_line(rng, customer) if rng.random() < 0.3 else None
    turns = _turns(facts, rng, japanese, customer if context else None, long, mix.topics)
    return _assemble(turns, lines, context, rng, long)


def _turns(
    facts: Facts, rng: random.Random, japanese: bool, customer: str | None, long: bool, topics: float
) -> list[Turn]:
    """One to six turns (more in a long dialogue), each independent or leaning on the one before."""
    count = rng.choices(_TURN_COUNTS, _TURN_WEIGHTS)[0]
    if long:
        count += rng.randint(2, 12)
    turns: list[Turn] = []
    while len(turns) < count:
        turn: Turn | None = None
        leaning = bool(turns) and rng.random() < 0.6
        if leaning:
            turn = _follow_up(turns[-1], facts, rng, japanese)
        leaning = turn is not None
        turn = turn or _first_turn(facts, rng, japanese, customer, topics)
        rough = roughen_ja(turn.user, rng) if japanese else roughen(turn.user, rng, follow_up=leaning)
        turns.append(replace(turn, user=rough))
    return turns


def _assemble(
    turns: list[Turn], lines: list[str], context: str | None, rng: random.Random, long: bool
) -> list[Message]:
    """Add system text, evidence and context to the turns, in one of the service's prompt formats."""
    system = prompts.system_text(rng, long) if long or rng.random() < 0.72 else None
    evidence = prompts.evidence_block(lines, rng) if lines else None
    messages: list[Message] = []
    in_user: list[str] = []
    if system:
        messages.append({"role": "system", "content": system})
    for text, own_message, with_user in ((evidence, 0.35, 0.3), (context, 0.45, 0.15)):
        if text is None:
            continue
        place = rng.random()
        if place < with_user:
            in_user.append(text)
        elif messages and place > with_user + own_message:
            messages[-1]["content"] += rng.choice(("\n", "\n\n")) + text
        else:
            messages.append({"role": "system", "content": text})
    for number, turn in enumerate(turns):
        user = "\n".join([*in_user, turn.user]) if number == 0 else turn.user
        messages.append({"role": "user", "content": user})
        messages.append({"role": "assistant", "content": turn.assistant})
    return messages


def dialogues(seed: int, mix: Mix | None = None) -> Iterator[list[Message]]:
    """An endless, reproducible stream of dialogues."""
    rng = random.Random(seed)
    while True:
        yield make_dialogue(rng, mix)
