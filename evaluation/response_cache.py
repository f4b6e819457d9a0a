"""How well similar questions are told: ``python -m evaluation.response_cache``.

The pairs of ``similar_questions.jsonl`` were written by hand, apart from the training: questions
that mean the same, and questions of nearly the same words that do not (another number, name, direction, a
``not``). The ``tuning`` pairs were looked at while the model was made; the ``test`` pairs were not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from resilience.word_embedding.model import WordEmbedding

PAIRS = Path(__file__).parent / "similar_questions.jsonl"
MODEL = Path("models/embedding")
THRESHOLDS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two questions; ``shop`` tells that they are of the field that the model was made for."""

    split: str
    language: str
    shop: bool
    same: bool
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class Score:
    """Pairs judged to be the same: ``right`` of the ``same`` ones, ``wrong`` of the ``different`` ones."""

    same: int
    different: int
    right: int
    wrong: int

    @property
    def precision(self) -> float:
        """Share of answers that were to the same question; 1 when there were none."""
        return self.right / (self.right + self.wrong) if self.right + self.wrong else 1.0

    @property
    def recall(self) -> float:
        """Share of the same questions that were found."""
        return self.right / self.same if self.same else 1.0


def load_pairs(path: Path = PAIRS) -> list[Pair]:
    """The pairs, as they stand in the file."""
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [
        Pair(row["split"], row["language"], row["domain"] == "shop", row["same"], row["a"], row["b"])
        for row in rows
    ]


def similarity(model: WordEmbedding, first: str, second: str) -> tuple[float, float]:
    """How similar two questions are, and from where on they count as the same; facts that differ are 0."""
    one, other = model.meaning(first), model.meaning(second)
    if one is None or other is None or one.facts != other.facts:
        return 0.0, 1.0
    return one.similarity(other.vector), max(one.threshold, other.threshold)


def score(model: WordEmbedding, pairs: Iterable[Pair], at: float | None = None) -> Score:
    """Judge the pairs at a threshold, or at the model's own."""
    same = different = right = wrong = 0
    for pair in pairs:
        found, own = similarity(model, pair.first, pair.second)
        hit = found >= (own if at is None else at)
        same, different = same + pair.same, different + (not pair.same)
        right, wrong = right + (hit and pair.same), wrong + (hit and not pair.same)
    return Score(same, different, right, wrong)


def main(
    model: Annotated[Path, typer.Option(help="the model's folder")] = MODEL,
    split: Annotated[str, typer.Option(help="test or tuning")] = "test",
    faults: Annotated[bool, typer.Option(help="list the pairs that are judged wrongly")] = False,
) -> None:
    """Print precision and recall by threshold, language and field."""
    console = Console()
    known = WordEmbedding.from_folder(model)
    pairs = [pair for pair in load_pairs() if pair.split == split]
    console.print(_table(f"all {split} pairs", known, pairs))
    for language in ("en", "ja"):
        for shop in (True, False):
            some = [pair for pair in pairs if pair.language == language and pair.shop == shop]
            console.print(_table(f"{language}, {'shop' if shop else 'other fields'}", known, some))
    if faults:
        for pair in pairs:
            found, own = similarity(known, pair.first, pair.second)
            if (found >= own) != pair.same:
                what = "missed" if pair.same else "WRONG"
                console.print(f"{what} {found:.3f} {pair.first!r} {pair.second!r}", highlight=False)


def _table(title: str, model: WordEmbedding, pairs: Sequence[Pair]) -> Table:
    table = Table("threshold", "precision", "recall", "right", "wrong", title=title)
    steps: list[float | None] = [None, *THRESHOLDS]
    for at in steps:
        got = score(model, pairs, at)
        name = f"own ({model.threshold})" if at is None else str(at)
        table.add_row(
            name,
            f"{got.precision:.3f}",
            f"{got.recall:.3f}",
            f"{got.right}/{got.same}",
            f"{got.wrong}/{got.different}",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
