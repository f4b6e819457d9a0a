"""Calls that succeed, with the real boto3 against the stand-in."""

from __future__ import annotations

import asyncio
import base64
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks.bedrock.stand_in import ANSWER, Behaviour, StandIn
from budgeting.values import ImageContent, Message
from gateway.backends.bedrock.answer import ConverseReader
from gateway.backends.bedrock.backend import BedrockBackend
from gateway.backends.bedrock.tools import ConverseTools
from gateway.contracts.events import Delta
from gateway.contracts.images import ImageData
from gateway.contracts.values import FinishReason, Usage
from resilience.failures import FailureKind
from tests.bedrock.conftest import MakeBackend
from tests.bedrock.support import SYSTEM, USER, failure_of, threads_of, until, wait_idle, work
from tests.conformance.harness import collect
from tests.images.samples import sample


async def test_an_answer_arrives_piece_by_piece_and_is_counted_as_bedrock_counts(
    bedrock: StandIn, make: MakeBackend
) -> None:
    bedrock.script(Behaviour(delay_s=0.1))
    answer = await collect(make(), work())
    assert answer.text == "".join(ANSWER)
    assert len(answer.deltas) > 3
    assert answer.completion.finish_reason is FinishReason.STOP
    assert answer.completion.usage == Usage(4, len(ANSWER), 0)
    assert answer.tokens == len(ANSWER)
    assert bedrock.last["messages"] == [
        {"role": "user", "content": [{"text": "Something like Vinland Saga?"}]}
    ]


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_model_with_shorter_answers_than_max_tokens_is_asked_for_its_own_limit(
    bedrock: StandIn, make: MakeBackend, streaming: bool
) -> None:
    message = (
        "The maximum tokens you requested exceeds the model limit of 4096. "
        "Try again with a maximum tokens value that is lower than 4096."
    )
    bedrock.script(Behaviour(status=400, error="ValidationException", message=message))
    answer = await collect(make(streaming=streaming), work(max_tokens=8000))
    assert answer.text == "".join(ANSWER)
    asked = [request["inferenceConfig"]["maxTokens"] for _, _, request in bedrock.seen]
    assert asked == [8000, 4096]
    assert answer.completion.warnings == ("max_tokens was lowered to 4096, the limit of the model",)
    refused = Behaviour(status=400, error="ValidationException", message=message)
    bedrock.script(refused, refused)
    failure = await failure_of(make(), work(max_tokens=4096))
    assert failure.kind is FailureKind.INVALID_INPUT and len(bedrock.seen) == 3, "it is not asked in circles"


ONE_OF_BOTH = "`temperature` and `top_p` cannot both be specified for this model. Please use only one."
DEPRECATED = "`temperature` is deprecated for this model."


@pytest.mark.parametrize(
    ("message", "hint", "left"),
    [(ONE_OF_BOTH, "top_p", {"temperature": 0.0}), (DEPRECATED, "temperature", {"topP": 0.9})],
)
async def test_a_model_that_refuses_a_sampling_hint_is_asked_without_it(
    bedrock: StandIn, make: MakeBackend, message: str, hint: str, left: dict[str, float]
) -> None:
    text = f"The model returned the following errors: {message}"
    bedrock.script(Behaviour(status=400, error="ValidationException", message=text))
    answer = await collect(make(), work(temperature=0.0, top_p=0.9))
    assert answer.text == "".join(ANSWER)
    assert bedrock.last["inferenceConfig"] == {"maxTokens": 64, **left}
    assert answer.completion.warnings == (f"{hint} was left out, because the model refuses it",)


async def test_the_first_piece_does_not_wait_for_the_rest(bedrock: StandIn, make: MakeBackend) -> None:
    backend, came = make(), []
    await collect(backend, work())
    bedrock.script(Behaviour(delay_s=0.15))

    async def out(delta: Delta) -> None:
        came.append(time.monotonic())

    await backend.generate(work(), out)
    assert came[-1] - came[0] > 0.4


async def test_what_is_read_from_and_written_to_the_cache_is_part_of_the_input(
    bedrock: StandIn, make: MakeBackend
) -> None:
    bedrock.script(Behaviour(cache=(2, 1)))
    answer = await collect(make(), work())
    assert answer.completion.usage == Usage(4, len(ANSWER), 2, cache_write_tokens=1)
    assert answer.deltas[-1].cached_tokens == 2


async def test_tokens_missing_from_pieces_are_added_at_the_end(bedrock: StandIn, make: MakeBackend) -> None:
    bedrock.script(Behaviour(pieces=("a word of some", " length"), tokens=5, delay_s=0.5))
    answer = await collect(make(), work())
    assert [(delta.text, delta.tokens) for delta in answer.deltas] == [
        ("a word of some", 1),
        (" length", 1),
        ("", 3),
    ]
    assert answer.completion.usage.output_tokens == 5


@pytest.mark.parametrize(
    ("reported", "meant"),
    [
        ("end_turn", FinishReason.STOP),
        ("stop_sequence", FinishReason.STOP),
        ("guardrail_intervened", FinishReason.STOP),
        ("max_tokens", FinishReason.LENGTH),
        ("model_context_window_exceeded", FinishReason.LENGTH),
        ("content_filtered", FinishReason.CONTENT_FILTER),
    ],
)
async def test_bedrocks_stop_reasons_become_finish_reasons(
    bedrock: StandIn, make: MakeBackend, reported: str, meant: FinishReason
) -> None:
    bedrock.script(Behaviour(stop_reason=reported))
    completion = (await collect(make(), work())).completion
    assert completion.finish_reason is meant
    assert completion.context_full is (reported == "model_context_window_exceeded")


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_stop_string_of_white_space_ends_the_answer_though_bedrock_is_not_told(
    bedrock: StandIn, make: MakeBackend, streaming: bool
) -> None:
    backend = make(streaming=streaming)
    bedrock.always["us-east-1"] = Behaviour(pieces=("One", ". \n", "\n Two", "\n", " more"))
    answer = await collect(backend, work(stop=("\n\n", "END")))
    assert (answer.text, answer.completion.finish_reason) == ("One. ", FinishReason.STOP)
    assert bedrock.last["inferenceConfig"]["stopSequences"] == ["END"]
    assert 0 < answer.tokens == answer.completion.usage.output_tokens
    whole = await collect(backend, work(stop=("\n\n\n",)))
    assert whole.text == "One. \n\n Two\n more"
    assert "stopSequences" not in bedrock.last["inferenceConfig"]
    await wait_idle(backend)


@given(st.lists(st.sampled_from(["a", " ", "\n", "\n\n", " \n b"]), max_size=12), st.data())
def test_blank_stop_strings_cut_the_same_however_the_text_comes(
    pieces: list[str], data: st.DataObject
) -> None:
    stops = data.draw(st.lists(st.sampled_from(["\n", "\n\n", " \n", "  ", "a"]), max_size=3))
    text, blank = "".join(pieces), [stop for stop in stops if not stop.strip()]
    reader = ConverseReader(ConverseTools(work()), 0.0, 7, stops=stops)
    given = [one for piece in pieces for one in reader.feed([Delta(piece, 0)])]
    got = "".join([one.text for one in (*given, *reader.finish()[0])])
    assert got == text[: min([at for stop in blank if (at := text.find(stop)) >= 0], default=len(text))]


async def test_max_tokens_and_stop_sequences_are_honoured(bedrock: StandIn, make: MakeBackend) -> None:
    backend = make()
    short = await collect(backend, work(max_tokens=2))
    assert (short.text, short.completion.finish_reason) == ("Vinland Saga", FinishReason.LENGTH)
    stopped = await collect(backend, work(stop=("Vagabond",)))
    assert (stopped.text, stopped.completion.finish_reason) == ("Vinland Saga and", FinishReason.STOP)


@pytest.mark.parametrize("streaming", [True, False])
async def test_the_stop_string_that_ended_the_answer_is_named_where_it_is_known(
    bedrock: StandIn, make: MakeBackend, streaming: bool
) -> None:
    claude = make(model_id="us.anthropic.claude-3-7-sonnet-20250219-v1:0", streaming=streaming)
    nova = make(model_id="us.amazon.nova-pro-v1:0", streaming=streaming)

    async def named(backend: BedrockBackend, *stops: str) -> str | None:
        return (await collect(backend, work(stop=stops))).completion.stop_sequence

    assert await named(claude, "Vagabond", "END") == "Vagabond"
    assert bedrock.last["additionalModelResponseFieldPaths"] == ["/stop_sequence"]
    assert await named(claude, "END", "\n") is None
    assert await named(nova, "Vagabond") == "Vagabond"
    assert await named(nova, "Vagabond", "END") is None
    assert "additionalModelResponseFieldPaths" not in bedrock.last


async def test_a_guardrail_goes_with_every_request(bedrock: StandIn, make: MakeBackend) -> None:
    await collect(make(guardrail={"id": "gr1", "version": "3"}), work())
    assert bedrock.last["guardrailConfig"] == {"guardrailIdentifier": "gr1", "guardrailVersion": "3"}


async def test_where_streaming_is_not_allowed_the_whole_answer_comes_at_once(
    bedrock: StandIn, make: MakeBackend
) -> None:
    backend = make(streaming=False)
    bedrock.script(Behaviour(cache=(1, 0)))
    answer = await collect(backend, work())
    assert bedrock.seen[-1][1] == "converse"
    assert answer.text == "".join(ANSWER)
    assert answer.completion.usage == Usage(4, len(ANSWER), 1)
    assert answer.tokens == len(ANSWER)


async def test_a_long_stable_prefix_gets_a_cache_point_and_a_short_one_does_not(
    bedrock: StandIn, make: MakeBackend
) -> None:
    backend = make(model_id="us.anthropic.claude-3-7-sonnet-20250219-v1:0")
    long, short = Message(SYSTEM, "You know manga. " * 400), Message(SYSTEM, "You know manga.")
    await collect(backend, work(long, Message(USER, "Hello")))
    assert bedrock.last["system"][-1] == {"cachePoint": {"type": "default"}}
    await collect(backend, work(short, Message(USER, "Hello")))
    assert bedrock.last["system"] == [{"text": "You know manga."}]


async def test_a_prompt_that_may_be_too_long_is_refused_before_it_is_sent(
    bedrock: StandIn, make: MakeBackend
) -> None:
    failure = await failure_of(make(max_input_tokens=20), work(Message(USER, "word " * 40)))
    assert failure.kind is FailureKind.TOKEN_LIMIT_EXCEEDED
    assert "max_input_tokens" in str(failure)
    assert bedrock.seen == []


async def test_estimates_learn_from_what_bedrock_tells(bedrock: StandIn, make: MakeBackend) -> None:
    backend = make(max_input_tokens=100)
    asked = work(Message(USER, "some " * 50))  # 50 tokens at the stand-in; guessed at 76, at most 99
    for _ in range(12):
        await collect(backend, asked)
    estimate = backend._counter.estimate(backend.model, asked.messages)
    assert 45 <= estimate.expected <= 55


async def test_images_go_as_bytes_count_in_the_estimate_and_teach_it_nothing(
    bedrock: StandIn, make: MakeBackend
) -> None:
    image = ImageContent(sha256="a")
    message = Message(USER, "What is this?", parts=("What is this?", image))
    asked = replace(
        work(message), images={"a": ImageData("image/png", memoryview(sample("png")))}, image_tokens=1_000
    )
    backend = make(max_input_tokens=1_100)
    before = backend._counter.estimate(backend.model, asked.messages)
    await collect(backend, asked)
    [turn] = bedrock.last["messages"]
    source = turn["content"][1]["image"]["source"]
    assert base64.b64decode(source["bytes"]) == sample("png")
    assert backend._counter.estimate(backend.model, asked.messages) == before
    failure = await failure_of(make(max_input_tokens=1_000), asked)
    assert failure.kind is FailureKind.TOKEN_LIMIT_EXCEEDED


async def test_connections_are_used_again(bedrock: StandIn, make: MakeBackend) -> None:
    backend = make()
    for _ in range(8):
        await collect(backend, work())
    assert bedrock.connections == 1


async def test_calls_beyond_the_limit_wait_in_line_and_too_many_are_refused(
    bedrock: StandIn, make: MakeBackend
) -> None:
    backend = make(max_concurrency=2)
    bedrock.always["us-east-1"] = Behaviour(pieces=("yes",), delay_s=0.05)
    loads = []

    async def sample_load() -> None:
        while backend.load.running:
            loads.append(backend.load)
            await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(collect(backend, work())) for _ in range(18)]
        await asyncio.sleep(0)  # each call has started or waits
        group.create_task(sample_load())
        loads.append(backend.load)
        refused = await failure_of(backend)
    assert all(call.result().text == "yes" for call in calls)
    assert refused.kind is FailureKind.THROTTLED and refused.retry_after_s == 1.0
    assert max(load.running for load in loads) == 2 and max(load.waiting for load in loads) == 16
    assert {load.max_running for load in loads} == {2}
    assert max(call.result().completion.queue_wait_s for call in calls) > 0.2
    assert threads_of(backend) <= 2
    await wait_idle(backend)


async def test_boto3_is_loaded_in_a_thread_and_not_before() -> None:
    script = (
        "import sys, time\n"
        "from gateway.wiring.bedrock import make_bedrock\n"
        "from gateway.config.backends import BedrockSection\n"
        "s = BedrockSection(kind='bedrock', model_id='m', region='r')\n"
        "b = make_bedrock('b', s, clock=time.monotonic)\n"
        "assert not {'boto3', 'botocore'} & set(sys.modules), 'loaded at import'\n"
        "b._transport.warm()\n"
        "assert 'boto3' in sys.modules\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stderr=subprocess.PIPE)
    _, reported = await process.communicate()
    assert process.returncode == 0, reported.decode()


async def test_a_stopped_backend_ends_its_calls_and_takes_no_more(
    bedrock: StandIn, make: MakeBackend
) -> None:
    backend = make()
    bedrock.script(Behaviour(fault="hang"))

    async def stop() -> None:
        await until(lambda: len(bedrock.seen) == 1)
        backend.stop()

    async with asyncio.TaskGroup() as group:
        call = group.create_task(failure_of(backend))
        group.create_task(stop())
    assert call.result().kind is FailureKind.STREAM_BROKEN
    assert (await failure_of(backend)).kind is FailureKind.BACKEND_UNAVAILABLE
    assert backend.state == "stopped"
