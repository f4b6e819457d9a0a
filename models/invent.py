"""Invented series, customers and orders: what a model must copy from the prompt as it cannot know it."""

from __future__ import annotations

import random

from models.catalogue import GENRES_JA, Series

_SYLLABLES = [
    "ka",
    "ki",
    "ku",
    "ko",
    "sa",
    "shi",
    "su",
    "so",
    "ta",
    "chi",
    "te",
    "to",
    "na",
    "ni",
    "no",
    "ha",
    "hi",
    "fu",
    "ma",
    "mi",
    "mu",
    "mo",
    "ya",
    "yu",
    "yo",
    "ra",
    "ri",
    "ru",
    "re",
    "ro",
    "wa",
    "ga",
    "gi",
    "go",
    "za",
    "ji",
    "da",
    "do",
    "ba",
    "bi",
    "be",
    "bo",
    "sho",
    "ryo",
    "kyo",
    "jun",
    "ken",
    "rin",
    "ren",
    "shin",
    "tsu",
    "tomo",
    "hana",
    "yama",
    "moto",
    "gawa",
    "mura",
    "saki",
]
_FIRST = [
    "Silver",
    "Crimson",
    "Hidden",
    "Paper",
    "Winter",
    "Glass",
    "Last",
    "Broken",
    "Silent",
    "Electric",
    "Wandering",
    "Hollow",
    "Golden",
    "Midnight",
    "Lunar",
    "Distant",
    "Iron",
    "Gentle",
    "Burning",
    "Velvet",
    "Seventh",
    "Salt",
    "Northern",
    "Little",
    "Drifting",
    "Copper",
    "Cobalt",
    "Borrowed",
    "Tiny",
    "Lucky",
    "Frozen",
    "Sleepy",
    "Amber",
    "Scarlet",
    "Quiet",
    "Ninth",
    "Hungry",
    "Floating",
    "Crooked",
    "Marble",
]
_SECOND = [
    "Harbor",
    "Garden",
    "Orbit",
    "Library",
    "Lantern",
    "Kingdom",
    "Kitchen",
    "Signal",
    "Orchard",
    "Sparrow",
    "Station",
    "Circus",
    "Engine",
    "Bakery",
    "Island",
    "Tower",
    "Forest",
    "Blade",
    "Theatre",
    "Witch",
    "Courier",
    "Atlas",
    "Lighthouse",
    "Planet",
    "Samurai",
    "Detective",
    "Melody",
    "Clockmaker",
    "Tiger",
    "Moth",
    "Compass",
    "Bridge",
    "Caravan",
    "Alchemist",
    "Umbrella",
    "Swimmer",
    "Painter",
    "Shrine",
    "River",
    "Academy",
]
_TAIL = ("Chronicle", "Diary", "Club", "Blues", "Days", "Wars", "Report", "Zero", "Story", "Code")
_KANJI = "月星花風雪海空夢森光影雨鳥竜剣夜朝春夏秋冬旅町庭塔鏡灯船猫狐"
_SURNAME_JA = [
    "佐藤",
    "鈴木",
    "高橋",
    "田中",
    "渡辺",
    "伊藤",
    "山本",
    "中村",
    "小林",
    "加藤",
    "吉田",
    "山田",
    "松本",
    "井上",
    "木村",
    "林",
    "清水",
    "森",
    "池田",
    "橋本",
]
_GIVEN_JA = [
    "葵",
    "蓮",
    "陽菜",
    "翔太",
    "結衣",
    "大輝",
    "美咲",
    "健",
    "直子",
    "真理",
    "悠人",
    "誠",
    "恵",
    "楓",
    "光",
    "智子",
]
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
CUSTOMERS = [
    "Lena",
    "Marco",
    "Yuki",
    "Sofia",
    "Tom",
    "Amira",
    "Jonas",
    "Elena",
    "Kenji",
    "Maya",
    "Oscar",
    "Nora",
    "Pablo",
    "Ingrid",
    "Hugo",
    "Chloe",
    "Felix",
    "Aiko",
    "Daniel",
    "Rosa",
]
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
CARRIERS = ("DHL", "UPS", "DPD", "Hermes", "GLS", "FedEx")


def name_from_syllables(rng: random.Random, low: int = 2, high: int = 4) -> str:
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
        return f"The {second} of {name_from_syllables(rng)}"
    if shape < 0.9:
        return f"{name_from_syllables(rng)} {second}"
    return f"{name_from_syllables(rng)} no {name_from_syllables(rng)}"


def invented_title_ja(rng: random.Random) -> str:
    """A made-up Japanese title of two to four kanji with a particle."""
    first = "".join(rng.sample(_KANJI, rng.randint(1, 2)))
    second = "".join(rng.sample(_KANJI, rng.randint(1, 2)))
    return f"{first}の{second}"


def invented_price(rng: random.Random) -> str:
    """A price in EUR between 4 and 29, as shops write it."""
    return f"{rng.randint(4, 29)}.{rng.choice(('99', '99', '90', '50', '49', '95', '00', '20'))}"


def invented_series(rng: random.Random) -> Series:
    """A series that no catalogue holds; every field is drawn afresh."""
    surname = name_from_syllables(rng)
    return Series(
        title=invented_title(rng),
        title_ja=invented_title_ja(rng),
        author=f"{name_from_syllables(rng, 2, 3)} {surname}",
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
