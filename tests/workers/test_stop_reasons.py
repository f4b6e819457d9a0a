"""The stop string that ended a text, as vLLM reports it in the field ``stop_reason``."""

from __future__ import annotations

import json

import pytest

from gateway.backends.port import Work
from gateway.backends.workers.answer import CompletionReader
from gateway.contracts.values import Sampling


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
