"""The stop string that ended a text, as vLLM reports it in the field ``stop_reason``."""

from __future__ import annotations

import json

import pytest
from msgspec import structs

from gateway.backends.port import Work
from gateway.backends.workers.answer import CompletionReader
from gateway.contracts.dialect import ParsedRequest
from gateway.contracts.openai_stream import OpenAIDialect
from gateway.contracts.values import FinishReason, Sampling
from gateway.testing import answer_for
from tests.contracts.test_stream_frames import REQUEST


@pytest.mark.parametrize(
    ("reported", "stop"), [("END", "END"), (None, None), (151645, None), ("another", None)]
)
def test_the_stop_string_is_one_of_the_requests(reported: object, stop: str | None) -> None:
    reader = CompletionReader(
        Work("gen_1", (1, 2, 3), (), Sampling(max_tokens=64, stop=("END", "STOP"))), lambda token: b""
    )
    choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": "stop", "stop_reason": reported}
    reader.feed(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\ndata: [DONE]\n\n")
    _, completion = reader.finish()
    assert completion.stop_sequence == stop


@pytest.mark.parametrize("stop", ["END", None])
@pytest.mark.parametrize("chat", [True, False])
def test_answers_have_the_stop_string_and_a_sluice_in_front_reads_it(stop: str | None, chat: bool) -> None:
    request = structs.replace(REQUEST, sampling=Sampling(max_tokens=64, stop=("END",)))
    asked, answer = ParsedRequest(request), answer_for(request, "x")
    answer = structs.replace(answer, finish_reason=FinishReason.STOP, stop_sequence=stop)
    dialect = OpenAIDialect(chat=chat)
    [choice] = json.loads(dialect.whole(asked, answer))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    frames = dialect.frames(asked)
    reader = CompletionReader(Work("gen_1", (1, 2, 3), (), request.sampling), lambda token: b"")
    reader.feed(frames.opening + frames.delta("x") + frames.finish(answer))
    assert reader.finish()[1].stop_sequence == stop
