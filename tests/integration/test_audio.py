"""Recordings through a real gateway, by the official client."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import openai
import pytest

from tests.integration.live import ADMIN_KEY, LiveGateway
from tests.integration.test_embeddings import billed, serving
from tests.workers.raw_worker import until
from tests.workers.speech_worker import MODEL, SECONDS, SPEECH, SpeechWorker

TEXT = SPEECH.decode()
TOKENS = SECONDS * 100
LARGE = 25 << 20


@asynccontextmanager
async def audio_gateway(
    folder: Path, *workers: SpeechWorker
) -> AsyncIterator[tuple[LiveGateway, openai.AsyncOpenAI, httpx.AsyncClient]]:
    async with (
        serving(folder, *workers, model=MODEL) as live,
        openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key=ADMIN_KEY, max_retries=0) as client,
        httpx.AsyncClient(base_url=live.url, headers=live.headers, timeout=300) as plain,
    ):
        yield live, client, plain


def most_bytes(live: LiveGateway) -> int:
    """The most memory that the gateway has had."""
    status = Path(f"/proc/{live.process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


async def test_the_official_client_gets_every_format_and_each_request_is_billed_once(tmp_path: Path) -> None:
    worker = SpeechWorker()
    async with audio_gateway(tmp_path, worker) as (live, client, _):
        audio = client.audio
        plain = await audio.transcriptions.create(
            model=MODEL,
            file=("a b.wav", SPEECH, "audio/wav"),
            language="en",
            prompt="names\r\n--x",
            temperature=0.2,
        )
        assert plain.text == TEXT and plain.usage is not None and plain.usage.type == "duration"
        form = worker.forms[0]
        assert (form["filename"], form["type"], form["size"]) == ("a b.wav", "audio/wav", len(SPEECH))
        assert (form["model"], form["language"], form["temperature"]) == (MODEL, "en", "0.2")
        assert form["prompt"] == "names\r\n--x" and form["response_format"] == "json"
        assert "stream" not in form
        verbose = await audio.transcriptions.create(
            model=MODEL, file=SPEECH, response_format="verbose_json", timestamp_granularities=["segment"]
        )
        assert verbose.segments is not None and verbose.segments[0].end == 6.5
        assert worker.forms[1]["timestamp_granularities[]"] == "segment"
        text = await audio.transcriptions.create(model=MODEL, file=SPEECH, response_format="text")
        assert text == TEXT + "\n"
        srt = await audio.transcriptions.create(model=MODEL, file=SPEECH, response_format="srt")
        assert srt == f"1\n00:00:00,000 --> 00:00:06,500\n{TEXT}\n"
        vtt = await audio.translations.create(model=MODEL, file=SPEECH, response_format="vtt")
        assert str(vtt) == f"WEBVTT\n\n00:00:00.000 --> 00:00:06.500\n{TEXT}\n"
        translated = await audio.translations.create(model=MODEL, file=SPEECH)
        assert translated.text == TEXT
        stream = await audio.transcriptions.create(model=MODEL, file=SPEECH, stream=True)
        words = [one.choices[0]["delta"]["content"] async for one in stream]  # type: ignore[union-attr]
        assert words == TEXT.split()
        rows = await billed(live, 7)
        seconds = ("audio", "stop", TOKENS, TOKENS, TOKENS * 1_000)
        rounded = ("audio", "stop", TOKENS - 25, TOKENS - 25, (TOKENS - 25) * 1_000)
        # A translation without a length is billed by its size.
        guess = ("audio", "stop", 1, 1, 1_000)
        assert rows == [seconds, rounded, seconds, rounded, rounded, guess, seconds]


async def test_an_unknown_model_and_a_file_that_is_too_large_are_refused(tmp_path: Path) -> None:
    worker = SpeechWorker()
    async with audio_gateway(tmp_path, worker) as (_, client, plain):
        with pytest.raises(openai.NotFoundError):
            await client.audio.transcriptions.create(model="whisper", file=SPEECH)
        too_large = await plain.post(
            "/v1/audio/transcriptions", files={"file": b"0" * (LARGE + 1)}, data={"model": MODEL}
        )
        assert too_large.status_code == 413
        assert not worker.forms


async def test_a_large_file_goes_on_from_the_disk_and_to_another_worker_when_one_is_killed(
    tmp_path: Path,
) -> None:
    workers = SpeechWorker(dies_after=1), SpeechWorker(dies_after=2)
    recording = os.urandom(LARGE - len(SPEECH) - 4096) + b"\0" * 4096 + SPEECH
    async with audio_gateway(tmp_path, *workers) as (live, client, _):
        before = most_bytes(live)
        for _ in range(3):
            made = await client.audio.transcriptions.create(model=MODEL, file=recording, timeout=300)
            assert made.text == TEXT
        forms = [form for worker in workers for form in worker.forms]
        assert {one["digest"] for one in forms} == {hashlib.sha256(recording).hexdigest()}
        assert len(forms) == 3
        assert [row[1] for row in await billed(live, 3)] == ["stop"] * 3
        assert most_bytes(live) - before < LARGE, "the file was whole in memory"


async def test_a_caller_that_leaves_ends_the_workers_request_and_a_broken_worker_is_an_error_event(
    tmp_path: Path,
) -> None:
    worker = SpeechWorker()
    worker.holds = asyncio.Event()
    async with audio_gateway(tmp_path, worker) as (live, _, plain):
        asked = {"data": {"model": MODEL, "stream": "true"}, "files": {"file": SPEECH * 1000}}
        async with plain.stream("POST", "/v1/audio/transcriptions", **asked) as answer:
            assert await anext(answer.aiter_lines()) != ""
            assert worker.forms
        await until(lambda: worker.left == 1)
        [cancelled] = await billed(live, 1)
        assert cancelled[1] == "cancelled" and cancelled[2] == 300  # 24,000 bytes by estimate
        worker.holds.set()
        worker.breaks = True
        broken = await plain.post("/v1/audio/transcriptions", **asked)
        assert broken.status_code == 200
        events = broken.text.strip().split("\n\n")
        assert len(events) == 2 and "[DONE]" not in broken.text
        assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == "backend_unavailable"
        assert [row[1:3] for row in await billed(live, 2)] == [("cancelled", 300), ("error", 300)]
        metrics = (await plain.get("/metrics")).text
        assert 'code="backend_unavailable",route="audio",status="200"} 1.0' in metrics
