"""OpenAI's transcriptions and translations: the request's form and the answers."""

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Annotated, Any, BinaryIO, ClassVar, Final, Literal

import orjson
from msgspec import structs
from pydantic import AfterValidator, Field, ValidationError

from gateway.contracts.embeddings import PooledAnswer, PooledRequest
from gateway.contracts.fields import ANYTHING, MAX_TOKEN_ID, Body, Label, Neutral, Temperature, no_null
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.refusals import first_refusal, not_allowed

CONTRACT: Final = "audio"
MAX_FILENAME: Final = 255
TOKENS_PER_AUDIO_S: Final = 100  # frames per second of Whisper's input; vLLM counts each as a prompt token
ENCODED_BYTES_PER_S: Final = 8_000
"""Assumed bit rate of recordings other than WAV: 64 kbit/s, as of MP3 at low and AAC at good quality."""
_MIN_WAV_BYTES_PER_S: Final = 1_000
_MAX_CUE_S: Final = 359_999.0  # a cue's hours have two digits
_MEDIA_TYPE: Final = re.compile(r"[a-z0-9.+-]{1,64}/[a-z0-9.+-]{1,64}")

_PASSED: Final = {
    *("language", "to_language", "prompt", "hotwords", "temperature", "seed", "max_completion_tokens")
}

EventSink = Callable[[bytes], Awaitable[None]]  # receives the data of each event of a stream
Task = Literal["transcriptions", "translations"]
SpeechHint = Annotated[str, Field(max_length=16_384), AfterValidator(no_null)]
Flag = Annotated[bool, Field(strict=False)]  # all values of a form are strings, so they are converted


class AudioBody(Body):
    """The fields of the form besides the file."""

    neutral: ClassVar[Neutral] = {
        "user": (ANYTHING,),
        "chunking_strategy": ("auto",),
    }
    model: Label
    language: Annotated[str, Field(pattern=r"^[A-Za-z]{2,3}(-[A-Za-z0-9]{2,8})?$")] | None = None
    to_language: Annotated[str, Field(pattern=r"^[A-Za-z]{2,3}(-[A-Za-z0-9]{2,8})?$")] | None = None
    prompt: SpeechHint | None = None
    hotwords: SpeechHint | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt", "diarized_json"] = "json"
    timestamp_granularities: Annotated[
        tuple[Literal["word", "segment"], ...], Field(alias="timestamp_granularities[]", strict=False)
    ] = ()
    temperature: Annotated[Temperature, Field(strict=False)] | None = None
    seed: Annotated[int, Field(strict=False, ge=0, le=MAX_TOKEN_ID)] | None = None
    max_completion_tokens: Annotated[int, Field(strict=False, ge=1, le=MAX_TOKEN_ID)] | None = None
    stream: Flag = False
    stream_include_usage: Flag = False


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording to transcribe or translate; ``tokens`` is an estimate.

    Args:
        file: stays open until the request has ended; it is read from its start, in threads.
        fields: the form's other fields that are sent to the worker.
        stream: whether the text is sent piece by piece as it is made.
        wants_usage: whether the stream has vLLM's event that contains only the usage.
    """

    task: Task
    file: BinaryIO = field(repr=False)
    size: int
    filename: str
    content_type: str
    fields: tuple[tuple[str, str], ...]
    stream: bool
    wants_usage: bool
    tokens: int


class AudioRequest(PooledRequest, frozen=True, kw_only=True):
    """A request for the text of a recording."""

    recording: Recording
    response_format: str


Transcript = PooledAnswer[Mapping[str, Any] | None]
"""One result: the text, as the worker's JSON object; ``None`` if it was streamed."""


async def no_event(event: bytes) -> None:
    """The :data:`EventSink` of a whole answer, which has no events."""


def audio_request(
    task: Task,
    given: Iterable[tuple[str, str]],
    file: BinaryIO,
    size: int,
    filename: str,
    content_type: str,
    head: bytes,
    origin: RequestOrigin,
) -> AudioRequest:
    """Convert a form to a request; ``head`` is the file's beginning. Raises InvalidRequest."""
    body = _body(given)
    if not size:
        raise not_allowed("file", "is empty", "a recording")
    if task == "translations" and (body.timestamp_granularities or body.response_format == "diarized_json"):
        name = "timestamp_granularities" if body.timestamp_granularities else "response_format"
        raise not_allowed(name, "is not for translations", "/v1/audio/transcriptions with it")
    if body.stream and body.response_format not in ("json", "text"):
        raise not_allowed(
            "stream", f"is true with response_format {body.response_format}", "json or text with it"
        )
    if body.stream_include_usage and not body.stream:
        raise not_allowed("stream_include_usage", "is true without stream", "stream true with it")
    asked = body.model_dump(include=_PASSED, exclude_none=True)
    # The gateway makes subtitles from segments: more servers return those. Only JSON contains the usage.
    timed = body.response_format in ("srt", "vtt", "verbose_json")
    asked["response_format"] = (
        "verbose_json" if timed else "json" if body.response_format == "text" else body.response_format
    )
    fields = [(name, str(value)) for name, value in asked.items()]
    fields += [("timestamp_granularities[]", one) for one in body.timestamp_granularities]
    media_type = content_type.partition(";")[0].strip().lower()
    return AudioRequest(
        **structs.asdict(origin),
        model=body.model,
        response_format=body.response_format,
        recording=Recording(
            task=task,
            file=file,
            size=size,
            filename=filename[:MAX_FILENAME] or "audio",
            content_type=media_type if _MEDIA_TYPE.fullmatch(media_type) else "application/octet-stream",
            fields=tuple(fields),
            stream=body.stream,
            wants_usage=body.stream_include_usage,
            tokens=ceil(size / _bytes_per_s(head) * TOKENS_PER_AUDIO_S),
        ),
    )


def _body(given: Iterable[tuple[str, str]]) -> AudioBody:
    fields: dict[str, Any] = {}
    for name, value in given:
        if name == "timestamp_granularities[]":
            fields.setdefault(name, []).append(value)
        elif name in fields:
            raise not_allowed(name[:64], "is given twice", "once")
        elif name.startswith("chunking_strategy["):  # clients send an object field by field
            raise not_allowed("chunking_strategy", "is an object", "'auto'")
        elif value or name == "model":  # an empty field of a form counts as absent
            fields[name] = value
    try:
        return AudioBody.model_validate(fields)
    except ValidationError as error:
        raise first_refusal(error.errors(include_url=False)) from None


def _bytes_per_s(head: bytes) -> int:
    """The recording's bytes per second: from a WAV file's header, else an assumed rate."""
    if head[:4] == b"RIFF" and head[8:16] == b"WAVEfmt " and len(head) >= 32:
        return max(_MIN_WAV_BYTES_PER_S, int.from_bytes(head[28:32], "little"))
    return ENCODED_BYTES_PER_S


def transcript_body(request: AudioRequest, body: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """A whole answer in the requested format, and its media type."""
    wanted = request.response_format
    if wanted in ("json", "verbose_json", "diarized_json"):
        return orjson.dumps(body), b"application/json"
    if wanted == "text":
        text = str(body["text"]) + "\n"
    else:
        whole = {"start": 0.0, "end": body.get("duration") or 0.0, "text": body["text"]}
        text = _subtitles(body.get("segments") or [whole], vtt=wanted == "vtt")
    return text.encode(), b"text/plain; charset=utf-8"


def _subtitles(segments: Sequence[Mapping[str, Any]], *, vtt: bool) -> str:
    mark = "." if vtt else ","
    cues = [
        f"{'' if vtt else f'{number}' + chr(10)}{_time(one['start'], mark)} --> {_time(one['end'], mark)}\n"
        # An empty line would end the cue, and an arrow may only be part of its time line.
        f"{' '.join(str(one['text']).split()).replace('-->', '->')}\n"
        for number, one in enumerate(segments, 1)
    ]
    return "\n".join((["WEBVTT\n"] if vtt else []) + cues)


def _time(seconds: float | str, mark: str) -> str:
    """The time as a cue has it; some workers write the duration as a string."""
    ms = round(min(max(0.0, float(seconds)), _MAX_CUE_S) * 1000)
    return f"{ms // 3_600_000:02}:{ms // 60_000 % 60:02}:{ms // 1000 % 60:02}{mark}{ms % 1000:03}"
