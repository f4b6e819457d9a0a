"""Rerank and scores over HTTP; the fake score of a text is its length."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.contracts.rerank import RerankBody
from gateway.testing import fake_services
from tests.http.conftest import Connect

ASKED = {"model": "m", "query": "q", "documents": ["aa", {"text": "aaaa", "id": 7}, "a", "bbbb"]}


async def posted(connect: Connect, path: str, body: dict[str, Any]) -> Any:
    async with connect(fake_services()) as client:
        return await client.post(path, json=body)


async def test_documents_come_back_the_most_relevant_first(connect: Connect) -> None:
    first = (await posted(connect, "/v1/rerank", ASKED)).json()
    assert [(one["index"], one["relevance_score"]) for one in first["results"]] == [
        (1, 4.0),
        (3, 4.0),
        (0, 2.0),
        (2, 1.0),
    ]
    assert [one["document"] for one in first["results"][:2]] == [{"text": "aaaa"}, {"text": "bbbb"}]
    assert first["usage"] == {"prompt_tokens": 4, "total_tokens": 4} and first["model"] == "m"
    second = (await posted(connect, "/v2/rerank", {**ASKED, "top_n": 2})).json()
    assert [one.keys() for one in second["results"]] == [{"index", "relevance_score"}] * 2
    bare = (await posted(connect, "/v1/rerank", {**ASKED, "return_documents": False})).json()
    assert "document" not in bare["results"][0]


def test_a_limit_of_zero_tokens_which_is_the_default_of_vllm_is_no_limit() -> None:
    body = RerankBody.model_validate({**ASKED, "max_tokens_per_doc": 0, "max_tokens_per_query": 0})
    assert (body.max_tokens_per_doc, body.max_tokens_per_query) == (None, None)


@pytest.mark.parametrize(
    ("texts", "scores"),
    [(("q", "aaa"), [3.0]), (("q", ["a", "aa"]), [1.0, 2.0]), ((["q", "r"], ["a", "aa"]), [1.0, 2.0])],
)
async def test_pairs_have_a_score_each(connect: Connect, texts: tuple[Any, Any], scores: list[float]) -> None:
    body = {"model": "m", "text_1": texts[0], "text_2": texts[1]}
    found = (await posted(connect, "/v1/score", body)).json()
    assert [(one["index"], one["score"]) for one in found["data"]] == list(enumerate(scores))
    assert (found["object"], found["data"][0]["object"]) == ("list", "score")
    for name in ("documents", "items"):
        newer = {"model": "m", "queries": texts[0], name: texts[1]}
        assert (await posted(connect, "/v1/score", newer)).json()["data"] == found["data"]


@pytest.mark.parametrize(
    ("path", "changes", "param"),
    [
        ("/v1/rerank", {"documents": []}, "documents"),
        ("/v1/rerank", {"documents": ["a", ""]}, "documents.1"),
        ("/v1/rerank", {"documents": ["a"] * 2_049}, "documents"),
        ("/v1/rerank", {"query": ""}, "query"),
        ("/v2/rerank", {"top_n": -1}, "top_n"),
        ("/v2/rerank", {"max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        ("/v2/rerank", {"rank_fields": ["title"]}, "rank_fields"),
        ("/v2/rerank", {"colour": "red"}, "colour"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/score", {"text_1": "a", "queries": "b", "text_2": ["c"]}, "queries"),
        ("/v1/score", {"text_1": "a", "documents": "b", "items": ["c"]}, "items"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"queries": ["a", "b"], "items": ["a", "b", "c"]}, "queries"),
        ("/v1/score", {"queries": "a", "documents": ["b", ""]}, "documents.1"),
        ("/v1/score", {"queries": "a", "items": ""}, "items"),
        ("/v1/score", {"queries": "a", "items": []}, "items"),
        ("/v1/score", {"queries": 5, "items": "a"}, "queries"),
        ("/v1/score", {"queries": "a", "items": ["b", 5]}, "items.1"),
        ("/v1/rerank", {"documents": ["a", 5]}, "documents.1"),
        ("/v1/rerank", {"documents": ["a", {"text": 5}]}, "documents.1.text"),
    ],
)
async def test_a_wrong_field_is_named_in_the_error(
    connect: Connect, path: str, changes: dict[str, Any], param: str
) -> None:
    asked = {"model": "m"} if path == "/v1/score" else ASKED
    refused = await posted(connect, path, {**asked, **changes})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(f"{param} ")
    if "queries" in changes or "items" in changes:
        assert "text_2" not in error["message"]
