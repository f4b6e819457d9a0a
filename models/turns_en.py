"""English turns: one question with its answer, according to the prompt's evidence."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from models import wording_delivery_en as delivery_words
from models import wording_series_en as series_words
from models import wording_shop_en as shop_words
from models import wording_talk_en as talk_words
from models.catalogue import Series, by_author, by_genre, load_catalogue, similar_to
from models.held_out import is_held_out
from models.invent import CUSTOMERS, WEEKDAYS, invented_series
from models.spin import say

PRONOUNS = ("it", "this series", "that one", "this one", "the series", "that manga")
_LEADS = (
    "hi, ",
    "hello, ",
    "hey, ",
    "quick question: ",
    "excuse me, ",
    "please tell me: ",
    "one more thing: ",
    "ok, ",
)
_TAILS = (" thanks", " please", " thank you", " I am curious.", " It is for a friend.")
_PREAMBLES = (
    "My name is {name}.",
    "I live in {city}.",
    "This is my first order.",
    "I have been reading manga for years.",
    "I am shopping for my nephew.",
    "I saw your shop online.",
    "Sorry to bother you.",
    "I am in a bit of a hurry.",
    "My friend told me about this shop.",
    "It is raining in {city} today.",
    "I just got home from work.",
    "I need your help.",
    "We have a long train ride tomorrow.",
    "I collect manga.",
    "Nice website!",
    "I have a question about your shop.",
    "Hope you are well.",
    "I was here last week.",
)
_STOP_WORDS = frozenset(
    [
        "a",
        "an",
        "the",
        "is",
        "are",
        "do",
        "does",
        "can",
        "could",
        "you",
        "i",
        "me",
        "my",
        "your",
        "of",
        "for",
        "to",
        "please",
        "what",
        "would",
        "tell",
    ]
)
_FOLLOW_LEADS = ("and ", "ok, and ", "great, ", "also, ", "", "", "thanks. ", "so ")


@dataclass(frozen=True)
class Facts:
    """The prompt's evidence: its series, delivery times and orders."""

    series: tuple[Series, ...] = ()
    delivery: dict[str, tuple[str, str]] = field(default_factory=dict)
    shipped: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    packing: dict[str, str] = field(default_factory=dict)
    publisher_listed: bool = True


@dataclass(frozen=True)
class Turn:
    """A question, its answer, and what a follow-up question would refer to."""

    user: str
    assistant: str
    focus: Series | None = None
    kind: str = ""
    place: str | None = None


def roughen(question: str, rng: random.Random, follow_up: bool = False) -> str:
    """Make a clean question look typed: lead-ins, preambles, casing, missing words and sometimes a typo."""
    text = question
    draw = rng.random()
    if follow_up:
        text = rng.choice(_FOLLOW_LEADS) + text
    elif draw < 0.12:
        text = rng.choice(_LEADS) + text
    elif draw < 0.18:
        text = text + rng.choice(_TAILS)
    elif draw < 0.25:
        text = text[:1].upper() + text[1:]
        text = (
            f"{say(_PREAMBLES, rng, {'name': rng.choice(CUSTOMERS), 'city': rng.choice(talk_words.CITIES)})}"
            f" {text}"
        )
    elif draw < 0.31:
        # Like a search box: only the words with meaning.
        text = " ".join(word for word in text.split() if word.lower() not in _STOP_WORDS) or text
    if rng.random() < 0.7:
        text = text[:1].upper() + text[1:]
    if rng.random() < 0.15:
        text = text.lower()
    if rng.random() < 0.2:
        text = text.rstrip("?.! ")
    if rng.random() < 0.05 and len(text) > 12:
        place = rng.randrange(4, len(text) - 4)
        if not text[place].isdigit():
            text = text[:place] + text[place + 1 :]
    return text


def _sentence(text: str) -> str:
    """Capitalise the first letter: titles and blurbs start some sentences."""
    return text[:1].upper() + text[1:]


def series_answer(series: Series, kind: str, rng: random.Random) -> str:
    """The answer to one kind of question about the series."""
    slots: dict[str, object] = {
        "t": series.title, "author": series.author, "genre": series.genre, "volumes": series.volumes,
        "publisher": series.publisher, "price": series.price, "blurb": series.blurb,
    }  # fmt: skip
    if kind == "volumes":
        return say(series_words.LENGTH[series.status], rng, slots)
    if kind == "status":
        return say(series_words.STATUS[series.status], rng, slots)
    if kind == "stock":
        return say(series_words.STOCK[series.stock], rng, slots)
    if kind == "price_stock":
        slots["stock_line"] = say(series_words.STOCK[series.stock][:1], rng, slots)
    slots["length"] = say(series_words.LENGTH[series.status], rng, slots)
    return _sentence(say(series_words.ANSWERS[kind], rng, slots))


def _with_extra(answer: str, series: Series, kind: str, rng: random.Random) -> str:
    """The answer, about every other time followed by one more fact or an offer."""
    if answer.endswith("?") or rng.random() < 0.45:
        return answer
    told = {"author_volumes": ("author", "volumes"), "price_stock": ("price",), "status": ("volumes",)}.get(
        kind, (kind,)
    )
    # An extra fact is never one that the answer already mentions.
    mentioned = {"author": series.author, "volumes": f"{series.volumes} volume", "price": series.price}
    choices = [
        extra
        for extra in series_words.EXTRAS
        if extra not in told
        and mentioned.get(extra, series.genre if extra == "genre" else "\0") not in answer
    ]
    extra = "offer" if rng.random() < 0.35 else rng.choice(choices)
    slots = {"author": series.author, "volumes": series.volumes, "price": series.price, "genre": series.genre}
    return f"{answer} {say(series_words.EXTRAS[extra], rng, slots)}"


def suggestion_slots(first: Series, second: Series) -> dict[str, object]:
    """Slots ``a…`` and ``b…`` for the two series that an answer recommends."""
    return {
        "a": first.title, "a_author": first.author, "a_genre": first.genre, "a_volumes": first.volumes,
        "a_price": first.price, "a_blurb": first.blurb, "b": second.title, "b_author": second.author,
    }  # fmt: skip


def _like_turn(series: Series, facts: Facts, rng: random.Random, name: str) -> Turn:
    """A recommendation "like X": from the evidence where it offers another series, else from stock."""
    question = say(series_words.QUESTIONS["like"], rng, {"t": name})
    offered = [other for other in facts.series if other.title != series.title]
    if offered:
        same_genre = [other for other in offered if other.genre == series.genre]
        first = (same_genre or offered)[0]
        slots = suggestion_slots(first, first) | {"t": series.title}
        return Turn(question, say(series_words.LIKE_FROM_EVIDENCE, rng, slots), first, "like")
    near = similar_to(series)
    first, second = rng.sample(near, 2)
    answer = say(series_words.LIKE, rng, suggestion_slots(first, second) | {"t": series.title})
    return Turn(question, answer, first, "like")


def series_turn(series: Series, kind: str, facts: Facts, rng: random.Random, pronoun: bool = False) -> Turn:
    """A question of one kind about the series, named by title or by a pronoun."""
    name = rng.choice(PRONOUNS) if pronoun else series.title
    if kind == "like":
        return _like_turn(series, facts, rng, name)
    question = say(series_words.QUESTIONS[kind], rng, {"t": name})
    if kind == "publisher" and series in facts.series and not facts.publisher_listed:
        answer = say(series_words.NOT_LISTED_ANSWERS, rng, {"t": series.title, "field": "publisher"})
        return Turn(question, answer, series, kind)
    answer = _with_extra(series_answer(series, kind, rng), series, kind, rng)
    return Turn(question, answer, series, kind)


def pick_series_turn(facts: Facts, rng: random.Random) -> Turn:
    """A question about a series of the evidence, or of the catalogue where there is no evidence."""
    series = rng.choice(facts.series) if facts.series else rng.choice(load_catalogue())
    kinds = [kind for kind in series_words.QUESTIONS if not is_held_out(series.title, kind)]
    if facts.series:
        kinds.remove("about")
    return series_turn(series, rng.choice(kinds), facts, rng)


def unknown_turn(rng: random.Random) -> Turn:
    """A question about a series that neither the evidence nor the catalogue holds."""
    title = invented_series(rng).title
    kind = rng.choice(("author", "volumes", "price", "stock", "about", "stock", "status"))
    question = say(series_words.QUESTIONS[kind], rng, {"t": title})
    return Turn(question, say(series_words.UNKNOWN_ANSWERS, rng, {"t": title}), kind=kind)


def genre_turn(facts: Facts, rng: random.Random) -> Turn:
    """A recommendation by genre, or the list of an author's series."""
    if facts.series:
        first = rng.choice(facts.series)
        pool = [series for series in facts.series if series.genre == first.genre]
        first = pool[0]
    else:
        first = rng.choice(load_catalogue())
        if rng.random() < 0.4:
            titles = [series.title for series in by_author(first.author)]
            listed = " and ".join(titles) if len(titles) < 3 else f"{', '.join(titles[:-1])} and {titles[-1]}"
            names = {"author": first.author, "titles": listed}
            question = say(series_words.BY_AUTHOR_QUESTIONS, rng, names)
            return Turn(question, say(series_words.BY_AUTHOR_ANSWERS, rng, names), first, "by_author")
        first = rng.choice(by_genre(first.genre))
    slots = suggestion_slots(first, first) | {"genre": first.genre}
    question = say(series_words.BY_GENRE_QUESTIONS, rng, slots)
    # Evidence lines have no blurb, so an answer based on them must not use one.
    answers: Sequence[str] = (
        series_words.BY_GENRE_ANSWERS[1:] if facts.series else series_words.BY_GENRE_ANSWERS
    )
    return Turn(question, _sentence(say(answers, rng, slots)), first, "genre_pick")


def delivery_turn(facts: Facts, rng: random.Random, follow_up: bool = False) -> Turn:
    """Delivery to a country: times and cost, from policy evidence where the prompt has some."""
    if facts.delivery:
        place = rng.choice(sorted(facts.delivery))
        days, cost = facts.delivery[place]
    elif rng.random() < 0.15:
        place, days, cost = rng.choice(delivery_words.NO_DELIVERY), "", ""
    else:
        days, cost, places = rng.choice(tuple(delivery_words.ZONES.values()))
        place = rng.choice(places)
    slots = {"place": place, "days": days, "cost": cost}
    questions = delivery_words.SHIP_TO_FOLLOW_UPS if follow_up else delivery_words.SHIP_TO_QUESTIONS
    answers = delivery_words.SHIP_TO_ANSWERS if days else delivery_words.NO_DELIVERY_ANSWERS
    return Turn(say(questions, rng, slots), say(answers, rng, slots), kind="delivery", place=place)


def order_turn(facts: Facts, rng: random.Random) -> Turn:
    """The status of an order: from order evidence, else where to look it up."""
    if facts.shipped or facts.packing:
        order = rng.choice(sorted(facts.shipped) + sorted(facts.packing))
        question = say(
            delivery_words.ORDER_QUESTIONS + delivery_words.ORDER_PLAIN_QUESTIONS, rng, {"order": order}
        )
        if order in facts.shipped:
            day, carrier, eta = facts.shipped[order]
            slots = {"order": order, "day": day, "carrier": carrier, "eta": eta}
            return Turn(question, say(delivery_words.ORDER_SHIPPED_ANSWERS, rng, slots))
        slots = {"order": order, "day": facts.packing[order]}
        return Turn(question, say(delivery_words.ORDER_PACKING_ANSWERS, rng, slots))
    if rng.random() < 0.4:
        return Turn(
            say(delivery_words.ORDER_PLAIN_QUESTIONS, rng), say(delivery_words.ORDER_PLAIN_ANSWERS, rng)
        )
    slots = {"order": f"{rng.choice(('#', '', '', 'no. '))}{rng.randint(1000, 999999)}"}
    return Turn(
        say(delivery_words.ORDER_QUESTIONS, rng, slots),
        say(delivery_words.ORDER_UNKNOWN_ANSWERS, rng, slots),
        kind="order",
    )


def topic_turn(topic: str, rng: random.Random, customer: str | None = None) -> Turn:
    """A turn of one shop topic, such as ``returns`` or ``greet``."""
    questions, answers = shop_words.TOPICS[topic]
    slots = {
        "city": rng.choice(talk_words.CITIES), "n": rng.randint(2, 99), "m": rng.randint(2, 99),
        "day": rng.choice(WEEKDAYS),
        "country": rng.choice(delivery_words.ZONES["eu"][2]),
    }  # fmt: skip
    answer = say(answers, rng, slots)
    if topic == "greet" and customer:
        answer = f"Hello {customer}! " + say(
            ("How can I help you today?", "What are you looking for today?"), rng
        )
    if topic not in shop_words.NO_CLOSER and not answer.endswith("?") and rng.random() < 0.25:
        answer = f"{answer} {say(shop_words.CLOSERS, rng)}"
    return Turn(say(questions, rng, slots), answer, kind=topic)
