"""`sluice cache calibrate`: thresholds from pairs of questions, with vectors of a server's /v1/embeddings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ops.cli.main import app
from ops.client import AdminError
from ops.similar_pairs import JudgedPairs, QuestionPair, read_pairs
from resilience.question_vectors import unit_vector
from tests.integration.test_similar_questions import words
from tests.resilience.words_embedder import vector_of
from tests.workers.vector_worker import MODEL, VectorWorker

BOOK = "who created the book berserk"
PAIRS = [
    (BOOK, "who made the book berserk", True),  # similarity 0.8
    ("who made berserk", "who created berserk", True),  # 0.667
    ("where is my order", "where is my book", False),  # 0.75
    ("where is order 12", "where is order 13", False),
    ("where can i buy it", BOOK, False),  # 0
]


def write(folder: Path, pairs: Iterable[tuple[str, str, bool]] = PAIRS) -> Path:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps({"a": a, "b": b, "same": same}) + "\n" for a, b, same in pairs))
    return path


async def calibrate(path: Path, *options: str, model: str = MODEL) -> tuple[Result, VectorWorker]:
    worker = VectorWorker(of=words)
    await worker.start()
    url = worker.url.removesuffix("/v1")
    command = ["cache", "calibrate", "--pairs", str(path), "--model", model, "--url", url, *options]
    try:
        return await asyncio.to_thread(CliRunner().invoke, app, command), worker
    finally:
        await worker.die()


async def test_the_threshold_that_finds_most_without_an_error_is_proposed(tmp_path: Path) -> None:
    done, worker = await calibrate(write(tmp_path), "--json")
    assert done.exit_code == 0, done.output
    answer: dict[str, Any] = json.loads(done.stdout)
    assert (answer["same"], answer["different"]) == (2, 3)
    assert answer["other_numbers"] == {"same": 0, "different": 1}
    proposed = answer["proposed"]
    assert (proposed["right"], proposed["wrong"], proposed["precision"], proposed["recall"]) == (
        1,
        0,
        1.0,
        0.5,
    )
    assert proposed["threshold"] == pytest.approx(0.775, abs=0.002)  # in the middle of 0.75 and 0.8
    assert proposed in answer["thresholds"]
    assert 0.3 < answer["wrong_at_most"] < 0.8  # three pairs give a loose bound
    # Each question is sent once.
    assert len(worker.inputs) == len(set(worker.inputs)) == 9

    loose, _ = await calibrate(tmp_path / "pairs.jsonl", "--precision", "0.6", "--json")
    assert json.loads(loose.stdout)["proposed"]["recall"] == 1.0


async def test_the_table_names_the_proposal_and_the_lines_to_configure(tmp_path: Path) -> None:
    done, _ = await calibrate(write(tmp_path))
    assert done.exit_code == 0, done.output
    assert "1/2" in done.stdout and " *" in done.stdout
    assert (
        "Never similar, because their numbers differ: 0 of the pairs with one meaning, 1 of those with "
        "different meanings." in done.stdout
    )
    assert f"response_cache: {{similar: {{model: {MODEL}, threshold: 0.77" in done.stdout


async def test_without_a_threshold_of_that_precision_the_exit_code_says_so(tmp_path: Path) -> None:
    done, _ = await calibrate(write(tmp_path, [(*PAIRS[1][:2], True), ("a b", "a b", False)]))
    assert done.exit_code == 1
    assert "No threshold that finds a pair has a precision of 1: " in done.stdout


def test_a_gateway_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    command = ["cache", "calibrate", "--pairs", str(write(tmp_path)), "--model", MODEL]
    done = CliRunner().invoke(app, [*command, "--url", "http://127.0.0.1:9"])
    assert done.exit_code == 1 and "is the gateway running there?" in done.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "pairs.jsonl:2: JSON is malformed"),
        ("[]", "pairs.jsonl:2: Expected `object`"),
        ('{"a": "x", "same": true}', "pairs.jsonl:2: Object missing required field `b`"),
        ('{"a": " ", "b": "y", "same": true}', "- at `$.a`; allowed: "),
        ('{"a": "x", "b": "y", "same": "yes"}', "pairs.jsonl:2: Expected `bool`"),
        ('{"a": "x", "b": "y", "same": true}', "has one kind of pairs"),
    ],
)
def test_a_line_that_is_no_pair_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"a": "x", "b": "y", "same": true}\n' + line + "\n")
    with pytest.raises(AdminError) as caught:
        read_pairs(path)
    assert message in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(AdminError, match="cannot be read"):
        read_pairs(tmp_path / "nowhere.jsonl")


WORDS = st.lists(st.sampled_from(["who", "made", "the", "book", "it"]), min_size=1, max_size=5).map(" ".join)


@given(st.lists(st.tuples(WORDS, WORDS, st.booleans()), min_size=2, max_size=20), st.floats(0.5, 1.0))
def test_no_threshold_of_the_precision_finds_more_than_the_proposed_one(
    given: list[tuple[str, str, bool]], precision: float
) -> None:
    pairs = [QuestionPair(*one) for one in given]
    pairs += [QuestionPair("a", "a", True), QuestionPair("a", "b", False)]
    texts = {text for pair in pairs for text in (pair.a, pair.b)}
    found = JudgedPairs(pairs, {text: unit_vector(vector_of(text)) or b"" for text in texts})
    proposed = found.propose(precision)
    scores = [found.at(step / 50) for step in range(1, 51)]
    best = max((one.right for one in scores if one.precision >= precision), default=0)
    assert best <= (0 if proposed is None else proposed.right)
    assert proposed is None or proposed.precision >= precision
    assert [one.recall for one in scores] == sorted((one.recall for one in scores), reverse=True)
