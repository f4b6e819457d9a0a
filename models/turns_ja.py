"""Japanese turns: one question with its answer."""

from __future__ import annotations

import random

from models import wording_ja as words
from models.catalogue import Series, by_genre, load_catalogue, similar_to
from models.held_out import is_held_out
from models.invent import invented_series
from models.spin import say
from models.turns_en import Facts, Turn


def roughen_ja(question: str, rng: random.Random) -> str:
    """Drop or swap the closing mark, as people do."""
    draw = rng.random()
    if draw < 0.15:
        return question.rstrip("。？")
    if draw < 0.3:
        return question.replace("？", "?")
    if draw < 0.36:
        return "すみません、" + question
    return question


def _slots(series: Series) -> dict[str, object]:
    return {
        "t": series.title_ja, "author": series.author_ja, "genre": series.genre_ja, "volumes": series.volumes,
        "price": series.price, "blurb": series.blurb_ja,
    }  # fmt: skip


def series_turn_ja(series: Series, kind: str, rng: random.Random, pronoun: bool = False) -> Turn:
    """A question of one kind about the series, named by title or by a pronoun."""
    slots = _slots(series)
    question = say(
        words.QUESTIONS[kind], rng, {"t": rng.choice(words.PRONOUNS) if pronoun else series.title_ja}
    )
    if kind == "like":
        first, second = rng.sample(similar_to(series), 2)
        slots |= {
            "a": first.title_ja,
            "a_author": first.author_ja,
            "a_genre": first.genre_ja,
            "b": second.title_ja,
        }
        return Turn(question, say(words.LIKE, rng, slots), first, kind)
    by_state = {
        "volumes": words.LENGTH.get(series.status),
        "status": words.STATUS.get(series.status),
        "stock": words.STOCK.get(series.stock),
    }
    answer = say(by_state.get(kind) or words.ANSWERS[kind], rng, slots)
    if rng.random() < 0.4:
        told = {"author": series.author_ja, "price": series.price, "genre": series.genre_ja}
        extra = rng.choice([name for name in words.EXTRAS if name == "offer" or told[name] not in answer])
        answer += say(words.EXTRAS[extra], rng, slots)
    return Turn(question, answer, series, kind)


def pick_series_turn_ja(facts: Facts, rng: random.Random) -> Turn:
    """A question about a series of the evidence, or of the catalogue where there is no evidence."""
    series = rng.choice(facts.series) if facts.series else rng.choice(load_catalogue())
    kinds = [kind for kind in words.QUESTIONS if not is_held_out(series.title, kind)]
    if facts.series:
        kinds = [kind for kind in kinds if kind not in ("about", "like")]
    return series_turn_ja(series, rng.choice(kinds), rng)


def genre_turn_ja(rng: random.Random) -> Turn:
    """A recommendation by genre."""
    first = rng.choice(by_genre(rng.choice(load_catalogue()).genre))
    slots: dict[str, object] = {
        "genre": first.genre_ja, "a": first.title_ja, "a_author": first.author_ja, "a_blurb": first.blurb_ja,
    }  # fmt: skip
    return Turn(say(words.BY_GENRE_QUESTIONS, rng, slots), say(words.BY_GENRE_ANSWERS, rng, slots), first)


def topic_turn_ja(topic: str, rng: random.Random) -> Turn:
    """A turn of one shop topic, such as ``returns`` or ``greet``."""
    questions, answers = words.TOPICS[topic]
    return Turn(say(questions, rng), say(answers, rng), kind=topic)


def other_turn_ja(rng: random.Random) -> Turn:
    """A series the shop does not have, or an order that cannot be looked up here."""
    if rng.random() < 0.5:
        title = invented_series(rng).title_ja
        kind = rng.choice(("author", "volumes", "stock", "price"))
        return Turn(
            say(words.QUESTIONS[kind], rng, {"t": title}), say(words.UNKNOWN_ANSWERS, rng, {"t": title})
        )
    slots = {"order": rng.randint(1000, 999999)}
    return Turn(say(words.ORDER_QUESTIONS, rng, slots), say(words.ORDER_UNKNOWN_ANSWERS, rng, slots))
