"""The model of similar questions is made the same way every time."""

from __future__ import annotations

import random
from pathlib import Path

from models.train_embedding import lexicon, train, wordings, write
from resilience.word_embedding.model import FILE_NAME, WordEmbedding
from resilience.word_embedding.question_text import TURNING


def test_training_twice_gives_the_same_file(tmp_path: Path) -> None:
    files = []
    for name in ("one", "other"):
        made = wordings(random.Random(1))[::10]
        write(tmp_path / name, *train(made, whole=True, steps=3, seed=1), 0.95, 0.96)
        files.append((tmp_path / name / FILE_NAME).read_bytes())
    assert files[0] == files[1]
    model = WordEmbedding.from_folder(tmp_path / "one")
    assert (model.threshold, model.strict) == (0.95, 0.96) and len(model.words) > 500


def test_every_meaning_has_wordings_and_no_slot_of_an_unknown_name() -> None:
    made = wordings(random.Random(1))
    assert len({(wording.language, wording.meaning) for wording in made}) > 200
    for wording in made:
        assert "(" not in wording.text and wording.text.format(x="a", y="b")


def test_words_that_turn_a_question_around_are_never_known() -> None:
    words = lexicon(iter(["Is it not the first one?", "what is more expensive"]))
    assert {"is", "it", "the", "one", "what", "expensive"} == set(words)
    assert not TURNING & set(words)
