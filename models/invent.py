"""Invented series, customers and orders, which a model cannot know and must copy from the prompt."""

from __future__ import annotations

import random

from models.catalogue import GENRES_JA, Series
from models.words import word_list

_SYLLABLES = word_list("syllables")
_FIRST = word_list("title_first")
_SECOND = word_list("title_second")
_TAIL = word_list("title_tail")
_SURNAME_HEADS = word_list("surname_heads")
_SURNAME_TAILS = word_list("surname_tails")
_GIVEN = word_list("given")
_KANJI = "月星花風雪海空夢森光影雨鳥竜剣夜朝春夏秋冬旅町庭塔鏡灯船猫狐"
_SURNAME_JA = word_list("surname_ja")
_GIVEN_JA = word_list("given_ja")
_BLURBS = (
    "two rivals share one small room",
    "a clerk receives letters from the future",
    "a crew repairs old machines at the edge of the world",
    "a family of cooks travels from port to port",
    "a retired hero opens a shop",
    "a girl learns to speak with storms",
    "a detective can only work at night",
    "three friends restart a forgotten school club",
)
_BLURBS_JA = ("小さな町の不思議な日々", "旅する料理人の物語", "嵐と話す少女の冒険", "夜だけ働く探偵の事件")
PUBLISHERS = ("VIZ Media", "Kodansha", "Yen Press", "Dark Horse", "Seven Seas", "Vertical", "Denpa")
CUSTOMERS = word_list("customers")
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
CARRIERS = ("DHL", "UPS", "DPD", "Hermes", "GLS", "FedEx")


def surname(rng: random.Random) -> str:
    """A made-up surname or place name: mostly two common parts, now and then random syllables."""
    if rng.random() < 0.25:
        return name_from_syllables(rng)
    return rng.choice(_SURNAME_HEADS) + rng.choice(_SURNAME_TAILS)


def person(rng: random.Random) -> str:
    """A made-up author, such as ``Aoi Kitamura``."""
    given = name_from_syllables(rng) if rng.random() < 0.2 else rng.choice(_GIVEN)
    return f"{given} {surname(rng)}"


def name_from_syllables(rng: random.Random, low: int = 2, high: int = 3) -> str:
    """A made-up name that sounds Japanese, such as ``Tamirago``."""
    return "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(low, high))).capitalize()


def invented_title(rng: random.Random) -> str:
    """A made-up English or romanised series title."""
    shape = rng.random()
    first, second = rng.choice(_FIRST), rng.choice(_SECOND)
    if shape < 0.4:
        return f"{first} {second}"
    if shape < 0.55:
        return f"{first} {second} {rng.choice(_TAIL)}"
    if shape < 0.7:
        return f"{rng.choice(_SECOND)} {rng.choice(_TAIL)}"
    if shape < 0.8:
        return f"The {second} of {surname(rng)}"
    if shape < 0.9:
        return f"{surname(rng)} {second}"
    return f"{surname(rng)} no {surname(rng)}"


def invented_title_ja(rng: random.Random) -> str:
    """A made-up Japanese title of two to four kanji with a particle."""
    first = "".join(rng.sample(_KANJI, rng.randint(1, 2)))
    second = "".join(rng.sample(_KANJI, rng.randint(1, 2)))
    return f"{first}の{second}"


def invented_price(rng: random.Random) -> str:
    """A price in EUR between 4 and 29, as shops write it."""
    return f"{rng.randint(4, 29)}.{rng.choice(('99', '99', '90', '50', '49', '95', '00', '20'))}"


def invented_series(rng: random.Random) -> Series:
    """Return a series that is in no catalogue; every field is drawn at random."""
    return Series(
        title=invented_title(rng),
        title_ja=invented_title_ja(rng),
        author=person(rng),
        author_ja=rng.choice(_SURNAME_JA) + rng.choice(_GIVEN_JA),
        genre=rng.choice(tuple(GENRES_JA)),
        volumes=rng.randint(1, 90),
        status=rng.choice(("complete", "complete", "ongoing", "on hiatus")),
        publisher=rng.choice(PUBLISHERS),
        price=invented_price(rng),
        stock=rng.choice(("in", "in", "low", "out", "pre")),
        blurb=rng.choice(_BLURBS),
        blurb_ja=rng.choice(_BLURBS_JA),
    )
