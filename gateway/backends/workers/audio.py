"""One call of a worker's ``/audio/transcriptions`` or ``/audio/translations``."""

import asyncio
from collections.abc import AsyncGenerator
from math import ceil
from secrets import token_hex
from typing import Any, Final

import msgspec
import orjson

from gateway.backends.workers.answer import DONE, EVENT_STREAM
from gateway.backends.workers.chunk_repair import MAX_COUNT, plausible
from gateway.backends.workers.client import Upload, WorkerClient, whole_body
from gateway.backends.workers.connection import Connection
from gateway.backends.workers.errors import BadHttp, ConnectionLost, TransportError
from gateway.backends.workers.refusal import failure_in_stream, failure_of_transport, refusal_of
from gateway.contracts.audio import TOKENS_PER_AUDIO_S, EventSink, Recording, Transcript
from gateway.contracts.sse import EventReader, EventTooLarge
from resilience.failures import BackendFailure

READ_BYTES: Final = 256 * 1024  # most bytes of the file in memory at a time
MAX_ANSWER_BYTES: Final = 16 << 20
"""Longest whole answer that is read: ten hours of speech with segments are some 8 MB."""
LAST_TYPE: Final = "transcript.text.done"
"""Type of OpenAI's last event. OpenAI's stream ends after it without ``[DONE]``."""


class _Usage(msgspec.Struct):
    """The usage fields of OpenAI and of vLLM, in whole answers and in streams."""

    seconds: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


class _Segment(msgspec.Struct):
    start: float
    end: float
    text: str


class _Whole(msgspec.Struct):
    """The fields that are validated in a whole answer."""

    text: str
    segments: list[_Segment] | None = None


class _Figures(msgspec.Struct):
    type: str | None = None
    choices: list[msgspec.Raw] | None = None
    usage: _Usage | None = None
    duration: float | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")


_read_whole = msgspec.json.Decoder(_Whole).decode
_read_figures = msgspec.json.Decoder(_Figures, strict=False).decode
_read_body = msgspec.json.Decoder(dict[str, Any]).decode


def upload_of(model: str, recording: Recording) -> Upload:
    """The multipart form, the file last. The caller chose the file's name: it is escaped as in browsers."""
    fields = [("model", model)]
    if recording.stream:
        fields += [("stream", "true"), ("stream_include_usage", "true")]
    boundary = token_hex(16)
    lines = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in (*fields, *recording.fields)
    ]
    filename = recording.filename.replace("\r", "%0D").replace("\n", "%0A").replace('"', "%22")
    lines.append(
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{filename}"\r\n'
        f"Content-Type: {recording.content_type}\r\n\r\n"
    )
    head, tail = "".join(lines).encode(), f"\r\n--{boundary}--\r\n".encode()

    async def pieces() -> AsyncGenerator[bytes | memoryview]:
        yield head
        await asyncio.to_thread(recording.file.seek, 0)
        while piece := await asyncio.to_thread(recording.file.read, READ_BYTES):
            yield piece
        yield tail

    content_type = f"multipart/form-data; boundary={boundary}".encode()
    length = len(head) + recording.size + len(tail)
    return Upload(content_type, length, pieces, answered_late=True)


async def transcript_of(
    client: WorkerClient, model: str, recording: Recording, headers: bytes, out: EventSink
) -> Transcript:
    """Transcribe on a worker. Raises TransportError; BackendFailure, final once text was pushed."""
    pushed = False

    async def push(event: bytes) -> None:
        nonlocal pushed
        pushed = True
        await out(event)

    connection = await client.post(f"/audio/{recording.task}", upload_of(model, recording), headers)
    try:
        if connection.status != 200:
            raise await refusal_of(connection, model=model)
        connection.first_token_received()
        if recording.stream:
            body, figures = None, await _streamed(connection, recording, push)
        else:
            body, figures = _whole(await whole_body(connection, MAX_ANSWER_BYTES))
        return Transcript(model, [body], *_tokens(figures, recording))
    except TransportError as error:
        if not pushed:
            raise
        failure = failure_of_transport(error, delivered=True)
        failure.no_retry_here = True
        raise failure from error
    except BackendFailure as failure:
        failure.no_retry_here |= pushed
        raise
    finally:
        connection.release()


def _whole(data: bytes) -> tuple[dict[str, Any], _Figures]:
    try:
        _read_whole(data)
        return _read_body(data), _read_figures(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise BadHttp("its transcript is not one of OpenAI's contract") from None


async def _streamed(connection: Connection, recording: Recording, out: EventSink) -> _Figures:
    if not connection.content_type.startswith(EVENT_STREAM):  # OpenAI's whisper-1 ignores ``stream``
        body, figures = _whole(await whole_body(connection, MAX_ANSWER_BYTES))
        await out(orjson.dumps({"type": "transcript.text.delta", "delta": body["text"]}))
        await out(orjson.dumps({**body, "type": LAST_TYPE}))
        return figures
    reader, counted, ended = EventReader(), _Figures(), False
    while data := await connection.read():
        try:
            events = reader.feed(data)
        except EventTooLarge as error:
            raise BadHttp(str(error)) from None
        for event in events:
            if event == DONE:
                connection.linger()
                return counted
            try:
                figures = _read_figures(event)
            except (msgspec.DecodeError, UnicodeDecodeError):
                raise BadHttp("an event of its transcript cannot be read") from None
            if bytes(figures.error) != b"null":
                raise failure_in_stream(bytes(figures.error))
            if figures.usage is not None:
                counted = figures
            ended = figures.type == LAST_TYPE
            if recording.wants_usage or figures.choices != []:
                await out(event)
    if ended:
        return counted
    raise ConnectionLost("the transcript broke off")


def _tokens(figures: _Figures, recording: Recording) -> tuple[int, int]:
    """Tokens of the recording and the text; the estimate if the worker reports no tokens and no length."""
    usage = figures.usage or _Usage()
    counted = usage.input_tokens if usage.prompt_tokens is None else usage.prompt_tokens
    made = usage.output_tokens if usage.completion_tokens is None else usage.completion_tokens
    if (tokens := plausible(counted)) is not None:
        return tokens, plausible(made) or 0
    seconds = figures.duration if usage.seconds is None else usage.seconds
    if seconds is None or not 0 <= seconds * TOKENS_PER_AUDIO_S <= MAX_COUNT:
        return recording.tokens, 0
    return ceil(seconds * TOKENS_PER_AUDIO_S), 0
