"""Retrieval calls of orchestrators: LangChain's `OpenAIEmbeddings`, and rerank by Cohere's client."""

from __future__ import annotations

import pytest

from tests.clients.shop_worker import MODEL, score_of, vector_of
from tests.integration.live import ADMIN_KEY, LiveGateway

TEXTS = [f"Order {number} of {'Berserk' if number % 3 else 'the sea'}" for number in range(150)]


def test_langchain_embeds_documents_and_a_query(shop: LiveGateway) -> None:
    openai = pytest.importorskip("langchain_openai", reason="pip install -e '.[clients]'")
    embeddings = openai.OpenAIEmbeddings(
        model=MODEL,
        base_url=f"{shop.url}/v1",
        api_key=ADMIN_KEY,
        max_retries=0,
        check_embedding_ctx_length=False,
    )
    assert embeddings.embed_documents(TEXTS) == [list(vector_of(text)) for text in TEXTS]
    assert embeddings.embed_query("where is it?") == list(vector_of("where is it?"))


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_cohere_ranks_documents(shop: LiveGateway, version: str) -> None:
    cohere = pytest.importorskip("cohere", reason="pip install -e '.[clients]'")
    make = cohere.Client if version == "v1" else cohere.ClientV2
    client = make(api_key=ADMIN_KEY, base_url=shop.url)
    query = "the sea order"
    ranked = client.rerank(model=MODEL, query=query, documents=TEXTS, top_n=5)
    best = sorted(range(len(TEXTS)), key=lambda index: (-score_of(query, TEXTS[index]), index))
    assert [one.index for one in ranked.results] == best[:5]
    assert ranked.results[0].relevance_score == 1.0
    assert ranked.meta.tokens.input_tokens == len(TEXTS)
    with pytest.raises(cohere.NotFoundError):
        client.rerank(model="unheard-of", query=query, documents=TEXTS)
