"""What the response cache relies on holds for each embedder."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest

from resilience.response_cache import ResponseCache, digest_of
from resilience.response_cache_memory import MemoryStore
from resilience.response_cache_values import CachedAnswer, CacheQuestion, Embedder, Meaning
from resilience.word_embedding.model import WordEmbedding

FOLDER = Path(__file__).parents[2] / "models" / "embedding"


class SameWords:
    """Finds questions of the same words: case, width, white space and final punctuation do not count."""

    fingerprint = "same words"

    def meaning(self, text: str) -> Meaning | None:
        words = unicodedata.normalize("NFKC", text).lower().rstrip(" \t\n.!?。").split()
        return Meaning(tuple(words), (), 1.0) if words else None


EMBEDDERS = [SameWords(), WordEmbedding.from_folder(FOLDER)]
TEXTS = [
    "Who created Berserk?",
    "  who CREATED Berserk ",
    "ベルセルクの作者は誰ですか。",
    "1984",
    "?",
    "",
    "x" * 5_000,
]


@pytest.mark.parametrize("embedder", EMBEDDERS)
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_means_the_same_each_time_and_is_similar_to_itself(embedder: Embedder, text: str) -> None:
    meaning = embedder.meaning(text)
    assert meaning == embedder.meaning(text)
    if meaning is not None:
        assert meaning.similarity(meaning.vector) >= meaning.threshold - 1e-9
        assert 0.0 < meaning.threshold <= 1.0


@pytest.mark.parametrize("embedder", EMBEDDERS)
def test_an_empty_text_has_no_meaning(embedder: Embedder) -> None:
    assert embedder.meaning("") is None and embedder.meaning(" \n") is None


def test_embedders_have_fingerprints_of_their_own() -> None:
    assert len({embedder.fingerprint for embedder in EMBEDDERS}) == len(EMBEDDERS)


@pytest.mark.parametrize("embedder", EMBEDDERS)
async def test_the_cache_finds_a_question_of_the_same_words(embedder: Embedder) -> None:
    def question(text: str) -> CacheQuestion:
        return CacheQuestion(digest_of([text]), "scope", text)

    store = MemoryStore(capacity=10, max_bytes=1 << 20, ttl_s=60.0, clock=lambda: 0.0)
    cache = ResponseCache(store, embedder=embedder, clock=lambda: 0.0, emit=lambda event: None)
    cache.remember(lambda: question("Who created Berserk?"), CachedAnswer("Miura", "stop"))
    await cache.flush()
    hit = await cache.find(question("who created Berserk"))
    assert hit is not None and not hit.exact and hit.kept.text == "Miura"
    assert await cache.find(question("Who created Monster?")) is None
