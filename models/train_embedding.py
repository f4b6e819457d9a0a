"""Makes the model of similar questions: ``python -m models.train_embedding``; the same numbers every time.

A vector for each word and each pair of neighbours, trained so that questions of one meaning lie together and
those of different meanings apart. Of the wordings of each meaning every fourth is kept back; they choose the
thresholds. ``python -m evaluation.response_cache`` measures the result on questions of neither.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from models import questions_en, questions_ja
from models.spin import spin
from resilience.word_embedding.model import FILE_NAME, FORMAT, WordEmbedding
from resilience.word_embedding.question_text import TURNING, QuestionReader, bigrams, features, plain, runs

FOLDER = Path(__file__).parent / "embedding"
DIMENSIONS = 64
SPINS = 40  # wordings drawn of each template; most have fewer
KEPT_BACK = 4  # every fourth template is not trained on
MEANINGS_A_STEP, WORDINGS_A_MEANING = 80, 5
# Questions of one meaning shall be at least as similar as the first, those of two at most as the second.
NEAR, FAR = 0.9, 0.6
SHARPNESS = 12.0
LEFT_OUT = 0.1
# How many other questions on the same facts a cache holds when the thresholds are chosen.
NEIGHBOURS = 12
# Of all answers that similarity gives, at least this share must be to the same question.
PRECISION = 0.998
# No threshold is lower: from here on none of the hand-written pairs that differ passes for the same. At 0.9
# one of 170 does (docs/response-cache.md).
LEAST = 0.95
NAMES = (("Naruto", "Bleach"), ("Dune", "Emma"), ("Lisbon", "Oslo"), ("Kimera", "Solaris"))
TERMS = (("reset", "password"), ("export", "invoices"), ("freeze", "soup"), ("tractor", "wheels"))
JA_NAMES = (("ナルト", "ブリーチ"), ("モンスター", "アキラ"))
JA_TERMS = (("税金", "保険"), ("猫", "犬"))


@dataclass(frozen=True, slots=True)
class Wording:
    """One question in words; slots are still open."""

    language: str
    meaning: str
    text: str
    kept_back: bool


def wordings(rng: random.Random) -> list[Wording]:
    """Every meaning in many wordings."""
    made = []
    for language, source in (("en", questions_en), ("ja", questions_ja)):
        for meaning, templates in source.QUESTIONS.items():
            for number, template in enumerate(templates):
                for text in {spin(template, rng): None for _ in range(SPINS)}:
                    whole = rng.choice(source.BEFORE) + text + rng.choice(source.BEHIND)
                    kept_back = number % KEPT_BACK == KEPT_BACK - 1
                    made.append(Wording(language, meaning, whole, kept_back))
    return made


def lexicon(texts: Iterator[str]) -> list[str]:
    """The words of the texts that the model may know, sorted."""
    words: set[str] = set()
    for text in texts:
        for kind, run in runs(plain(text)):
            if kind == "kana":
                words.update(bigrams(run))
            elif kind in ("kanji", "loan"):
                words.add(run)
            elif kind == "word":
                words.add(run.lower())
    return sorted(words - TURNING)


def without_slots(text: str) -> str:
    """The text with its slots empty: what fills them is no word of the model's."""
    return text.format(x="\ue000", y="\ue000")


def bag(reader: QuestionReader, wording: Wording) -> list[str]:
    """The features of a wording, its slots filled with words that nobody knows."""
    x, y = ("qqx", "qqy") if wording.language == "en" else ("クク", "ケケ")
    return features(reader.read(wording.text.format(x=x, y=y)).known)


def train(made: list[Wording], *, whole: bool, steps: int, seed: int) -> tuple[list[str], torch.Tensor]:
    """The features and a row for each; ``whole``: also of the wordings that are kept back."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    rng = random.Random(seed)
    ours = [wording for wording in made if whole or not wording.kept_back]
    reader = QuestionReader(lexicon(without_slots(wording.text) for wording in ours))
    bags = [bag(reader, wording) for wording in ours]
    names = sorted({name for one in bags for name in one})
    place = {name: number for number, name in enumerate(names)}
    by_meaning: dict[tuple[str, str], list[list[int]]] = {}
    for wording, one in zip(ours, bags, strict=True):
        numbers = [place[name] for name in one]
        by_meaning.setdefault((wording.language, wording.meaning), []).append(numbers)
    meanings = sorted(by_meaning)
    table = torch.nn.EmbeddingBag(len(names), DIMENSIONS, mode="sum")
    torch.nn.init.normal_(table.weight, std=0.1)
    optimizer = torch.optim.AdamW(table.parameters(), lr=0.01, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        chosen: list[list[int]] = []
        labels: list[int] = []
        for number in rng.sample(range(len(meanings)), min(MEANINGS_A_STEP, len(meanings))):
            chosen += rng.choices(by_meaning[meanings[number]], k=WORDINGS_A_MEANING)
            labels += [number] * WORDINGS_A_MEANING
        # A feature left out now and then: no meaning may hang on one alone.
        chosen = [[number for number in one if rng.random() > LEFT_OUT] or one for one in chosen]
        starts = [0, *itertools.accumulate(map(len, chosen))][:-1]
        flat = torch.tensor([number for one in chosen for number in one])
        vectors = torch.nn.functional.normalize(table(flat, torch.tensor(starts)), dim=1)
        label = torch.tensor(labels)
        likeness = vectors @ vectors.T
        same = label[:, None] == label[None, :]
        near = torch.nn.functional.softplus(SHARPNESS * (NEAR - likeness))[same].mean()
        # The worst pairs count: most of the others are far apart after a few steps.
        far = torch.nn.functional.softplus(SHARPNESS * (likeness - FAR)).masked_fill(same, 0.0)
        loss = near + 2 * far.topk(8, dim=1).values.mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
    print(f"{len(meanings)} meanings, {len(names)} features, loss {loss.item():.3f}")
    return names, table.weight.detach()


def threshold(model: WordEmbedding, made: list[Wording], *, foreign: bool, seed: int, draws: int) -> float:
    """The least similarity at which ``PRECISION`` holds for wordings that were kept back.

    Each is asked of a cache that holds ``NEIGHBOURS`` questions of other meanings on the same facts, and one
    of its own every other time.
    """
    rng = random.Random(seed)
    found: list[tuple[float, bool]] = []
    for language, names, terms in (("en", NAMES, TERMS), ("ja", JA_NAMES, JA_TERMS)):
        ours = [wording for wording in made if wording.language == language]
        by_meaning: dict[str, list[Wording]] = {}
        for wording in ours:
            by_meaning.setdefault(wording.meaning, []).append(wording)
        for draw in range(draws):
            x, y = rng.choice(terms if foreign else names)
            kept = [
                (meaning, model.meaning(rng.choice(group).text.format(x=x, y=y)))
                for meaning, group in by_meaning.items()
            ]
            for meaning, group in by_meaning.items():
                asked = rng.choice([wording for wording in group if wording.kept_back] or group)
                mine = model.meaning(asked.text.format(x=x, y=y))
                if mine is None or (mine.threshold == model.strict) != foreign:
                    continue
                same_facts = [
                    (mine.similarity(other.vector), other_meaning == meaning)
                    for other_meaning, other in kept
                    if other is not None and other.facts == mine.facts
                ]
                own = [one for one in same_facts if one[1]] if draw % 2 else []
                others = [one for one in same_facts if not one[1]]
                asked_of = own + rng.sample(others, min(NEIGHBOURS, len(others)))
                if asked_of:
                    found.append(max(asked_of))
    found.sort(reverse=True)
    right, best = 0, 1.0
    for number, (similarity, same) in enumerate(found, 1):
        right += same
        if right / number >= PRECISION:
            best = similarity
    taken = sum(similarity >= best for similarity, _ in found)
    print(f"{'foreign' if foreign else 'own'} field: {best:.3f}, {taken} of {len(found)} answered")
    return round(min(best, 0.999), 3)


def write(folder: Path, words: list[str], table: torch.Tensor, own: float, strict: float) -> None:
    """The model's file, a line a word."""
    scale = float(table.abs().max()) / 127
    rows = (table / scale).round().to(torch.int8)
    head = {
        "format": FORMAT,
        "dimensions": DIMENSIONS,
        "threshold": own,
        "strict": strict,
    }
    lines = [
        f'{json.dumps(word, ensure_ascii=False)}: "{base64.b64encode(bytes(row.numpy())).decode()}"'
        for word, row in zip(words, rows, strict=True)
    ]
    text = json.dumps(head, indent=0)[:-2] + ',\n"words": {\n' + ",\n".join(lines) + "\n}\n}\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE_NAME).write_text(text, encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    """Entry point of the command line."""
    cli = argparse.ArgumentParser(prog="models.train_embedding", description=__doc__)
    cli.add_argument("--out", type=Path, default=FOLDER)
    cli.add_argument("--steps", type=int, default=1500)
    cli.add_argument("--seed", type=int, default=7)
    cli.add_argument("--draws", type=int, default=40, help="caches that the thresholds are tried on")
    args = cli.parse_args(argv)
    made = wordings(random.Random(args.seed))

    # The thresholds come from a model that has not seen the wordings they are tried on.
    write(args.out, *train(made, whole=False, steps=args.steps, seed=args.seed), 0.0, 1.0)
    model = WordEmbedding.from_folder(args.out)
    own = threshold(model, made, foreign=False, seed=args.seed, draws=args.draws)
    strict = threshold(model, made, foreign=True, seed=args.seed, draws=args.draws)
    write(
        args.out,
        *train(made, whole=True, steps=args.steps, seed=args.seed),
        max(own, LEAST),
        max(strict, LEAST),
    )


if __name__ == "__main__":
    main()
