"""The shop's catalogue: public facts about real series, with invented prices and stock levels."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

GENRES_JA = {
    "dark fantasy": "ダークファンタジー",
    "historical": "歴史",
    "thriller": "サスペンス",
    "mystery": "ミステリー",
    "sci-fi": "SF",
    "fantasy": "ファンタジー",
    "slice of life": "日常",
    "action": "アクション",
    "adventure": "冒険",
    "sports": "スポーツ",
    "romance": "恋愛",
    "drama": "ドラマ",
    "horror": "ホラー",
    "comedy": "コメディ",
    "supernatural": "怪奇",
}
STATUS_JA = {"complete": "完結済み", "ongoing": "連載中", "on hiatus": "休載中"}
STOCK_EN = {"in": "in stock", "low": "low stock", "out": "out of stock", "pre": "preorder"}
STOCK_JA = {"in": "在庫あり", "low": "残りわずか", "out": "在庫切れ", "pre": "予約受付中"}

# Related genres, used when a genre has too few series to recommend from.
_KIN = {
    "mystery": "thriller",
    "slice of life": "drama",
    "sports": "drama",
    "dark fantasy": "horror",
    "adventure": "action",
    "drama": "romance",
    "thriller": "mystery",
    "supernatural": "action",
}


@dataclass(frozen=True)
class Series:
    """One manga series as the shop sells it; ``price`` is in EUR for one volume."""

    title: str
    title_ja: str
    author: str
    author_ja: str
    genre: str
    volumes: int
    status: str
    publisher: str
    price: str
    stock: str
    blurb: str
    blurb_ja: str

    @property
    def genre_ja(self) -> str:
        """The genre's Japanese name."""
        return GENRES_JA[self.genre]


def _series(row: dict[str, str]) -> Series:
    fields: dict[str, Any] = {**row, "volumes": int(row["volumes"])}
    return Series(**fields)


@lru_cache(maxsize=1)
def load_catalogue() -> tuple[Series, ...]:
    """Every series of the shop, in file order."""
    path = Path(__file__).with_name("catalogue.psv")
    with path.open(encoding="utf-8", newline="") as handle:
        rows = list(csv.DictReader(handle, delimiter="|"))
    return tuple(_series(row) for row in rows)


def by_genre(genre: str) -> tuple[Series, ...]:
    """The series of one genre."""
    return tuple(series for series in load_catalogue() if series.genre == genre)


def by_author(author: str) -> tuple[Series, ...]:
    """The series of one author."""
    return tuple(series for series in load_catalogue() if series.author == author)


def similar_to(series: Series) -> tuple[Series, ...]:
    """Series to recommend to a reader of this one: same genre, then the neighbouring genre."""
    near = [other for other in by_genre(series.genre) if other != series]
    if len(near) < 3 and series.genre in _KIN:
        near += by_genre(_KIN[series.genre])
    return tuple(near)
