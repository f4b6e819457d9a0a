"""Frames arrive whole, however the socket splits them."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import EngineError, PromptTooLong, error_from_code
from engine.values import (
    EngineSignals,
    GenerationRequest,
    SamplingParams,
    SequenceEnd,
    SequenceOutput,
    coalesce,
)
from engine.wire import (
    Abort,
    Add,
    Command,
    Event,
    FrameReader,
    StepOutputs,
    encode,
)


@given(cuts=st.lists(st.integers(1, 40), min_size=1))
def test_messages_arrive_whole_whatever_the_pieces(cuts: list[int]) -> None:
    messages = [
        Add(GenerationRequest("1:é", (1, 2, 3), SamplingParams(5, stop=("終",), seed=-4))),
        Abort("1:é"),
        Abort("2"),
    ]
    stream = b"".join(encode(message) for message in messages)
    reader, received, at = FrameReader(Command), [], 0
    while at < len(stream):
        size = cuts[at % len(cuts)]
        received += reader.feed(stream[at : at + size])
        at += size
    assert received == messages


def test_a_step_carries_all_outputs_and_the_signals() -> None:
    outputs = (
        SequenceOutput("a", "hi", (1, 2), SequenceEnd.STOP, 3, 2, 0, 0.1, None, "END"),
        SequenceOutput("b", "", (), SequenceEnd.ERROR, error="nan_output"),
    )
    step = StepOutputs(outputs, EngineSignals(running=2, kv_usage=0.5))
    assert list(FrameReader(Event).feed(encode(step))) == [step]


@pytest.mark.parametrize("garbage", [b"\x00\x00\x00\x01\xc1", b"\x00\x00\x00\x00"])
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        list(FrameReader(Event).feed(garbage))


def test_outputs_coalesce_without_losing_text_tokens_or_times() -> None:
    joined = coalesce(
        "a",
        [
            SequenceOutput("a", "x", (1,), None, 5, 1, 0, 0.5),
            SequenceOutput("a", "y", (2,), None, 5, 2),
            SequenceOutput("a", "z", (3, 4), SequenceEnd.LENGTH, 5, 4, 0, 0.5),
        ],
    )
    assert joined == SequenceOutput("a", "xyz", (1, 2, 3, 4), SequenceEnd.LENGTH, 5, 4, 0, 0.5)


def test_an_error_is_rebuilt_from_its_code() -> None:
    error = error_from_code("prompt_too_long", "too long")
    assert type(error) is PromptTooLong
    assert str(error) == "too long"
    assert type(error_from_code("from_a_newer_version", "?")) is EngineError
