"""Uploads of recordings over HTTP; the fake transcript is the file's bytes as text."""

from __future__ import annotations

import struct
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.config.batches import BatchesSection
from gateway.config.settings import ServerConfig
from gateway.contracts.audio import AudioBody, audio_request, transcript_body
from gateway.contracts.origin import RequestOrigin
from gateway.errors import InvalidRequest
from gateway.requests.body_memory import BodyMemory
from gateway.testing import fake_services
from tests.http.conftest import Connect
from tests.journey.rig import CALLER

WHOLE = "/v1/audio/transcriptions"
ORIGIN = RequestOrigin("req", "gen", CALLER, 0.0, 0, "trace")
FILE = {"file": ("a.mp3", b"it was", "audio/mpeg")}


async def posted(connect: Connect, path: str = WHOLE, **form: Any) -> Any:
    services = fake_services()
    services = replace(services, limits=ServerConfig(max_audio_bytes=100_000))
    async with connect(services) as client:
        return await client.post(path, **{"data": {"model": "m"}, "files": FILE, **form})


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ("text", "it was\n"),
        ("srt", "1\n00:00:00,000 --> 00:01:01,500\nit was\n"),
        ("vtt", "WEBVTT\n\n00:00:00.000 --> 00:01:01.500\nit was\n"),
    ],
)
async def test_texts_and_subtitles_are_plain_text(connect: Connect, wanted: str, text: str) -> None:
    answer = await posted(connect, data={"model": "m", "response_format": wanted})
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.text == text


@pytest.mark.parametrize(
    ("duration", "end"),
    [("2.5", "00:00:02.500"), ("nan", "00:00:00.000"), (-3, "00:00:00.000"), (1e300, "99:59:59.000")],
)
def test_a_transcript_without_segments_is_one_cue_whatever_length_the_worker_writes(
    duration: object, end: str
) -> None:
    asked = audio_request(
        "transcriptions", [("model", "m"), ("response_format", "vtt")], BytesIO(), 9, "a", "", b"", ORIGIN
    )
    body, _ = transcript_body(asked, {"text": "", "duration": duration, "segments": []})
    assert body.decode() == f"WEBVTT\n\n00:00:00.000 --> {end}\n\n"


async def test_a_streamed_transcript_is_sent_as_events_and_ends_with_done(connect: Connect) -> None:
    answer = await posted(connect, data={"model": "m", "stream": "true"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text == 'data: {"choices": [{"delta": {"content": "it was"}}]}\n\ndata: [DONE]\n\n'


def test_a_worker_divides_the_recording_itself_when_auto_is_asked_for() -> None:
    given = [("model", "m"), ("chunking_strategy", "auto"), ("user", "u")]
    asked = audio_request("transcriptions", given, BytesIO(), 9, "a", "", b"", ORIGIN)
    assert asked.recording.fields == (("response_format", "json"),)


def test_another_division_is_refused_with_the_one_that_is_allowed() -> None:
    given = [("model", "m"), ("chunking_strategy[type]", "server_vad")]  # as OpenAI's client sends an object
    with pytest.raises(InvalidRequest, match=r"^chunking_strategy is an object; allowed: 'auto'$"):
        audio_request("transcriptions", given, BytesIO(), 9, "a", "", b"", ORIGIN)


def test_each_field_of_the_form_is_in_the_manual() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "audio.md").read_text()
    fields = {one.alias or name for name, one in AudioBody.model_fields.items()} | AudioBody.neutral.keys()
    assert {name for name in fields if f"`{name}`" not in manual} == set()


REFUSED: dict[str, tuple[dict[str, Any], str, int]] = {
    "no file": ({"files": {"other": b"a"}}, "file", 400),
    "a text for a file": ({"files": {}, "data": {"file": "a", "model": "m"}}, "content-type", 415),
    "an empty file": ({"files": {"file": b""}}, "file", 400),
    "a long file": ({"files": {"file": b"a" * 100_001}}, "file", 413),
    "a file far too long": ({"files": {"file": b"a" * 400_000}}, "file", 413),
    "no model": ({"data": {}}, "model", 400),
    "a format": ({"data": {"model": "m", "response_format": "xml"}}, "response_format", 400),
    "a language": ({"data": {"model": "m", "language": "English, please"}}, "language", 400),
    "a temperature": ({"data": {"model": "m", "temperature": "hot"}}, "temperature", 400),
    "a flag": ({"data": {"model": "m", "stream": "perhaps"}}, "stream", 400),
    "an unknown field": ({"data": {"model": "m", "speed": "2"}}, "speed", 400),
    "a field twice": ({"data": {"model": ["m", "n"]}}, "model", 400),
    "a streamed subtitle": ({"data": {"model": "m", "stream": "1", "response_format": "srt"}}, "stream", 400),
    "usage of no stream": (
        {"data": {"model": "m", "stream_include_usage": "true"}},
        "stream_include_usage",
        400,
    ),
    "json": ({"files": None, "data": None, "json": {"model": "m"}}, "content-type", 415),
}


@pytest.mark.parametrize(("form", "param", "status"), REFUSED.values(), ids=REFUSED)
async def test_a_wrong_field_of_the_form_is_named(
    connect: Connect, form: dict[str, Any], param: str, status: int
) -> None:
    answer = await posted(connect, **form)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


@pytest.mark.parametrize("path", [WHOLE, "/v1/files"])
@pytest.mark.parametrize("name", ["file", "other"])
async def test_a_second_file_of_a_form_is_refused_by_its_name(connect: Connect, path: str, name: str) -> None:
    files: Any = SimpleNamespace(section=BatchesSection(), store=None)
    async with connect(fake_services(files=files)) as client:
        answer = await client.post(path, files=[("file", b"a"), (name, b"b")])
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, name), answer.text
    assert error["message"] == f"{name} is a second file; allowed: one file"


@pytest.mark.parametrize("path", [WHOLE, "/v1/files"])
@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"data": {"prompt": "a" * 65_537}}, "prompt"),
        ({"data": {f"field_{number}": "" for number in range(17)}}, "field_16"),
        ({"content": "--b\r\n\0: a", "headers": {"content-type": "multipart/form-data; boundary=b"}}, None),
    ],
)
async def test_the_part_of_a_form_at_which_reading_stops_is_named(
    connect: Connect, path: str, form: dict[str, Any], param: str | None
) -> None:
    files: Any = SimpleNamespace(section=BatchesSection(), store=None)
    asked: dict[str, Any] = {"files": {"file": b"a"}} if "data" in form else {}
    async with connect(fake_services(files=files)) as client:
        answer = await client.post(path, **asked, **form)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert answer.json()["error"]["message"].startswith("the form cannot be read")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", "7", "temperature is '7'; allowed: 2.0 or less"),
        ("temperature", "-0.5", "temperature is '-0.5'; allowed: 0.0 or more"),
        ("temperature", "nan", "temperature is 'nan'; allowed: a finite number"),
        ("temperature", "hot", "temperature is a string of 3 characters; allowed: a number"),
        ("seed", "-1", "seed is '-1'; allowed: 0 or more"),
    ],
)
async def test_a_number_of_the_form_out_of_its_range_is_shown_with_the_range(
    connect: Connect, name: str, value: str, message: str
) -> None:
    answer = await posted(connect, data={"model": "m", name: value})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)


async def test_recordings_in_progress_take_a_bounded_part_of_the_disk_and_free_it(connect: Connect) -> None:
    services = fake_services()
    services = replace(services, recordings=BodyMemory(200_000))
    room = services.recordings
    async with connect(services) as client:
        for size, status in ((90_000, 200), (110_000, 429), (90_000, 200)):
            form = {"data": {"model": "m"}, "files": {"file": bytes(size)}}
            answer = await client.post(WHOLE, **form)
            assert (answer.status_code, room.held_bytes) == (status, 0), size
        assert (
            "retry-after" in (await client.post(WHOLE, **form | {"files": {"file": bytes(110_000)}})).headers
        )
        with room.holding("other") as more:
            more(100_000)
            with room.holding("third") as others:
                others(50_000)
                assert (await client.post(WHOLE, **form)).status_code == 503
        assert room.held_bytes == 0


@pytest.mark.parametrize("path", [WHOLE, "/v1/files"])
@pytest.mark.parametrize("charset", ["unicode_escape", "undefined", "utf-16"])
async def test_a_form_in_an_unusual_charset_is_refused_by_its_header(
    connect: Connect, path: str, charset: str
) -> None:
    field = 'Content-Disposition: form-data; name="\\ud800"\r\n\r\na'
    body = f"--b\r\n{field}\r\n--b\r\n{field}\r\n--b--\r\n".encode()
    headers = {"content-type": f"multipart/form-data; boundary=b; charset={charset}"}
    files: Any = SimpleNamespace(section=BatchesSection(), store=None)
    async with connect(fake_services(files=files)) as client:
        answer = await client.post(path, content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (415, "content-type")


@pytest.mark.parametrize("charset", ["UTF-8", "iso-8859-1", "us-ascii"])
async def test_a_form_in_a_usual_charset_is_read(connect: Connect, charset: str) -> None:
    field, file = 'form-data; name="model"', 'form-data; name="file"; filename="a.wav"'
    parts = [f"--b\r\nContent-Disposition: {one}\r\n\r\nm\r\n" for one in (field, file)]
    headers = {"content-type": f"multipart/form-data; boundary=b; charset={charset}"}
    answer = await posted(
        connect, content=f"{''.join(parts)}--b--\r\n", headers=headers, data=None, files=None
    )
    assert (answer.status_code, answer.json()["text"]) == (200, "m")


@pytest.mark.parametrize("field", ["prompt", "hotwords"])
async def test_the_bound_of_a_hint_is_named_in_characters(connect: Connect, field: str) -> None:
    refused = await posted(connect, data={"model": "m", field: "a" * 16_385})
    message = f"{field} is a string of 16385 characters; allowed: 16384 characters or fewer"
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, message)


async def test_translations_have_no_words_with_times(connect: Connect) -> None:
    asked = {"model": "m", "response_format": "verbose_json", "timestamp_granularities[]": "word"}
    assert (await posted(connect, data=asked)).status_code == 200
    refused = await posted(connect, "/v1/audio/translations", data=asked)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "timestamp_granularities"


def test_a_recordings_length_is_estimated_by_its_header_or_its_size() -> None:
    wav = b"RIFF" + bytes(4) + b"WAVEfmt " + struct.pack("<IHHII", 16, 1, 1, 16_000, 32_000)
    for head, size, tokens in ((wav, 64_000, 200), (b"ID3", 64_000, 800), (wav[:20], 8_000, 100)):
        made = audio_request("transcriptions", [("model", "m")], None, size, "", "x", head, ORIGIN)  # type: ignore[arg-type]
        assert made.recording.tokens == tokens
        assert (made.recording.filename, made.recording.content_type) == ("audio", "application/octet-stream")
