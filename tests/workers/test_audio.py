"""Transcripts of workers: unusable ones, streams, and uploads that end early."""

from __future__ import annotations

import asyncio
import io
import json
import tempfile
from typing import Any

import pytest

from gateway.contracts.audio import Recording
from gateway.contracts.values import Caller, CallerRole
from resilience.failures import BackendFailure, FailureKind
from tests.workers.raw_worker import (
    DONE,
    END,
    STREAM_HEAD,
    RawWorker,
    Request,
    chunk,
    event,
    pool,
    refuses,
    until,
)
from tests.workers.speech_worker import SPEECH, SpeechWorker

CALLER = Caller("acme", CallerRole.CALLER, "key_1")
TEXT = SPEECH.decode()


def recording(content: bytes = SPEECH, **changes: Any) -> Recording:
    given: dict[str, Any] = {
        "task": "transcriptions",
        "file": io.BytesIO(content),
        "size": len(content),
        "filename": "speech.wav",
        "content_type": "audio/wav",
        "fields": (("response_format", "json"),),
        "stream": False,
        "wants_usage": False,
        "tokens": 33,
    }
    return Recording(**{**given, **changes})


async def no_event(event: bytes) -> None:
    raise AssertionError("nothing was to be streamed")


class BadSpeech(RawWorker):
    """Reads a form without parsing it, and answers by script."""

    async def read_body(self, reader: asyncio.StreamReader, headers: dict[str, str]) -> Any:
        await reader.readexactly(int(headers.get("content-length", "0")))


UNUSABLE = {
    "no object": [],
    "no text": {"usage": {}},
    "a number": {"text": 7},
    "segments without times": {"text": "a", "segments": [{"text": "a"}]},
    "a time that is none": {"text": "a", "segments": [{"text": "a", "start": "early", "end": 1}]},
}


@pytest.mark.parametrize("reply", UNUSABLE.values(), ids=UNUSABLE)
async def test_unusable_transcripts_are_asked_for_on_another_worker(reply: Any) -> None:
    bad, good = BadSpeech([refuses(200, reply)]), SpeechWorker(model="base")
    async with pool(bad, good, affinity=False) as backend:
        for _ in range(3):  # the pool may choose either worker first
            made = await backend.transcribe(recording(), CALLER, no_event)
            assert made.results[0] is not None and made.results[0]["text"] == TEXT
    assert bad.requests


async def test_a_recording_carries_the_trace_context() -> None:
    worker = SpeechWorker(model="base")
    async with pool(worker) as backend:
        await backend.transcribe(recording(), CALLER, no_event, b"traceparent: 00-aa-bb-01\r\n")
    assert worker.requests[-1].headers["traceparent"] == "00-aa-bb-01"


@pytest.mark.parametrize(
    ("reply", "tokens"),
    [
        ({"usage": {"type": "duration", "seconds": 2}}, (200, 0)),
        ({"usage": {"type": "tokens", "input_tokens": 14, "output_tokens": 5, "total_tokens": 19}}, (14, 5)),
        ({"duration": 1.501}, (151, 0)),
        ({"duration": -1}, (33, 0)),
        ({"duration": 1e300, "usage": {"input_tokens": 2**60}}, (33, 0)),
        ({}, (33, 0)),
    ],
)
async def test_tokens_are_the_workers_or_follow_from_the_duration_or_are_estimated(
    reply: dict[str, Any], tokens: tuple[int, int]
) -> None:
    async with pool(BadSpeech([refuses(200, {"text": "", **reply})])) as backend:
        made = await backend.transcribe(recording(), CALLER, no_event)
    assert (made.input_tokens, made.output_tokens) == tokens


class AnswersBeforeReading(RawWorker):
    """Answers an upload before it has read any of it."""

    async def read_body(self, reader: asyncio.StreamReader, headers: dict[str, str]) -> Any:
        if "multipart/" not in headers.get("content-type", ""):
            return await super().read_body(reader, headers)
        return None


async def test_a_worker_that_answers_before_it_has_the_file_is_sent_no_more() -> None:
    async def refuse(request: Request) -> None:
        await request.whole(413, b"{}")
        # Until the gateway closes the connection.
        while await request.reader.read(1 << 16):
            taken.append(1)

    taken: list[int] = []
    with tempfile.TemporaryFile() as file:
        file.truncate(64 << 20)
        async with pool(AnswersBeforeReading([refuse])) as backend:
            with pytest.raises(BackendFailure) as caught:
                await backend.transcribe(recording(file=file, size=64 << 20), CALLER, no_event)
        assert caught.value.kind is FailureKind.TOKEN_LIMIT_EXCEEDED
    assert len(taken) < 512  # the whole file needs at least 1,024 reads


class Counted(io.BytesIO):
    """A file of ``size`` zero bytes; ``given`` of them have been read."""

    size = 64 << 20
    given = 0

    def read(self, size: int | None = -1) -> bytes:
        piece = bytes(min(size or 0, self.size - self.given))
        self.given += len(piece)
        return piece

    def seek(self, offset: int, whence: int = 0) -> int:
        self.given = offset
        return offset


async def test_a_file_is_read_no_faster_than_the_worker_takes_it_and_a_cancelled_one_no_further() -> None:
    begun, ends = asyncio.Event(), asyncio.Event()

    async def waits(request: Request) -> None:
        begun.set()
        await ends.wait()
        request.reset()

    file = Counted()
    async with pool(AnswersBeforeReading([waits])) as backend, asyncio.TaskGroup() as group:
        asked = recording(file=file, size=file.size)
        call = group.create_task(backend.transcribe(asked, CALLER, no_event))
        await begun.wait()
        await until(lambda: file.given > 0)
        before = -1
        while file.given != before:  # until the socket buffers are full
            before = file.given
            await asyncio.sleep(0.2)
        assert file.given < file.size // 2
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled() and file.given < file.size // 2
        ends.set()


async def test_a_worker_that_fails_after_its_first_event_is_not_replaced() -> None:
    async def breaks(request: Request) -> None:
        await request.send(STREAM_HEAD, chunk(event({"choices": [{"delta": {"content": "it"}}]})))
        request.reset()

    async def reports(request: Request) -> None:
        pieces = event({"choices": [{"delta": {"content": "it"}}]}) + event({"error": {"message": "no"}})
        await request.send(STREAM_HEAD, chunk(pieces + DONE), END)

    for behaviour in (breaks, reports):
        workers = BadSpeech([behaviour]), BadSpeech([behaviour])
        events: list[bytes] = []

        async def push(event: bytes, events: list[bytes] = events) -> None:
            events.append(event)

        async with pool(*workers, affinity=False) as backend:
            with pytest.raises(BackendFailure) as caught:
                await backend.transcribe(recording(stream=True), CALLER, push)
            assert caught.value.no_retry_here
        assert len(events) == 1
        assert len(workers[0].requests) + len(workers[1].requests) == 1


async def test_a_stream_of_openai_ends_without_done_and_has_its_own_usage() -> None:
    last = {
        "type": "transcript.text.done",
        "text": "it",
        "usage": {"type": "tokens", "input_tokens": 14, "output_tokens": 2},
    }

    async def openais(request: Request) -> None:
        pieces = event({"type": "transcript.text.delta", "delta": "it"}) + event(last)
        await request.send(STREAM_HEAD, chunk(pieces), END)

    events: list[bytes] = []

    async def push(event: bytes) -> None:
        events.append(event)

    async with pool(BadSpeech([openais])) as backend:
        made = await backend.transcribe(recording(stream=True), CALLER, push)
    assert (made.results, made.input_tokens, made.output_tokens, len(events)) == ([None], 14, 2, 2)


async def test_a_worker_that_does_not_stream_gives_the_whole_text_as_openais_events() -> None:
    async def whole(request: Request) -> None:  # as OpenAI's service with whisper-1
        await request.whole(200, json.dumps({"text": "it", "usage": {"seconds": 2}}).encode())

    events: list[bytes] = []

    async def push(event: bytes) -> None:
        events.append(event)

    async with pool(BadSpeech([whole])) as backend:
        made = await backend.transcribe(recording(stream=True), CALLER, push)
    assert (made.results, made.input_tokens) == ([None], 200)
    assert [json.loads(one) for one in events] == [
        {"type": "transcript.text.delta", "delta": "it"},
        {"type": "transcript.text.done", "text": "it", "usage": {"seconds": 2}},
    ]


@pytest.mark.parametrize("wants_usage", [True, False])
async def test_the_usage_event_is_passed_on_only_when_it_is_asked_for(wants_usage: bool) -> None:
    events: list[bytes] = []

    async def push(event: bytes) -> None:
        events.append(event)

    async with pool(SpeechWorker(model="base")) as backend:
        made = await backend.transcribe(recording(stream=True, wants_usage=wants_usage), CALLER, push)
    assert (made.input_tokens, made.output_tokens) == (700, 6)
    assert len(events) == len(TEXT.split()) + wants_usage
