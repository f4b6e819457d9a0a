"""A worker that turns recordings into text: the text is in the recording."""

from __future__ import annotations

import asyncio
import hashlib
import json
from contextlib import suppress
from functools import partial
from typing import Any

from python_multipart.multipart import parse_options_header

from tests.workers.raw_worker import END, STREAM_HEAD, RawWorker, Request, chunk, event

MODEL = "whisper-small"
SPEECH = b"it was a bright cold day"
SECONDS = 7


class SpeechWorker(RawWorker):
    """Lists one model, and reads the form of each request.

    ``dies_after``: it is killed in the upload after so many. ``holds``: a stream's second word waits for it.
    """

    def __init__(self, *, model: str = MODEL, dies_after: int | None = None) -> None:
        listed = json.dumps({"data": [{"id": model, "max_model_len": 448}]}).encode()
        super().__init__([self.transcribe], models=partial(bytes, listed))
        self.dies_after = dies_after
        self.holds: asyncio.Event | None = None
        self.breaks = False
        self.uploads = self.left = 0
        self.forms: list[dict[str, Any]] = []

    async def read_body(self, reader: asyncio.StreamReader, headers: dict[str, str]) -> Any:
        if not headers.get("content-type", "").startswith("multipart/"):
            return await super().read_body(reader, headers)
        self.uploads += 1
        length = int(headers["content-length"])
        if self.dies_after is not None and self.uploads > self.dies_after:
            await reader.readexactly(length // 2)
            await self.die()
            raise ConnectionError
        return form_of(headers["content-type"], await reader.readexactly(length))

    async def transcribe(self, request: Request) -> None:
        form = request.body
        self.forms.append(form)
        if form.get("stream") == "true":
            await self.stream(request)
            return
        timed = form["response_format"] == "verbose_json"
        segments = [{"id": 0, "start": 0.0, "end": 6.5, "text": f" {form['text']}"}]
        body: dict[str, Any] = {"text": form["text"]}
        if timed:
            body |= {"duration": SECONDS - 0.25, "language": "en", "segments": segments}
        elif request.path.endswith("/transcriptions"):
            body["usage"] = {"type": "duration", "seconds": SECONDS}
        await request.whole(200, json.dumps(body).encode())

    async def left_before(self, request: Request, holds: asyncio.Event) -> bool:
        """Wait until ``holds`` is set or the gateway closes the connection; whether the gateway closed it."""
        async with asyncio.TaskGroup() as group:
            waiting, reading = group.create_task(holds.wait()), group.create_task(closed(request))
            await asyncio.wait((waiting, reading), return_when=asyncio.FIRST_COMPLETED)
            left = reading.done()
            waiting.cancel()
            reading.cancel()
        self.left += left
        return left

    async def stream(self, request: Request) -> None:
        await request.send(STREAM_HEAD)
        for word in request.body["text"].split():
            await request.send(
                chunk(event({"object": "transcription.chunk", "choices": [{"delta": {"content": word}}]}))
            )
            if self.holds is not None and await self.left_before(request, self.holds):
                return
            if self.breaks:
                request.reset()
                return
        used = {"prompt_tokens": 700, "completion_tokens": 6, "total_tokens": 706}
        await request.send(chunk(event({"choices": [], "usage": used}) + event(b"[DONE]")), END)


async def closed(request: Request) -> None:
    with suppress(ConnectionError):
        await request.reader.read(1)


def form_of(content_type: str, body: bytes) -> dict[str, Any]:
    """The form's fields; of the file its name, type, size and digest, and its last 64 bytes as ``text``."""
    boundary = parse_options_header(content_type)[1][b"boundary"]
    assert body.endswith(b"\r\n--" + boundary + b"--\r\n")
    fields: dict[str, Any] = {}
    for part in body.removesuffix(b"--\r\n").split(b"--" + boundary + b"\r\n")[1:]:
        head, _, value = part.partition(b"\r\n\r\n")
        value = value.removesuffix(b"--" + boundary).removesuffix(b"\r\n")
        options = parse_options_header(head.split(b"\r\n")[0].partition(b": ")[2])[1]
        name = options[b"name"].decode()
        if b"filename" in options:
            fields |= {
                "filename": options[b"filename"].decode(),
                "type": head.partition(b"Content-Type: ")[2].decode(),
                "digest": hashlib.sha256(value).hexdigest(),
                "size": len(value),
                "text": value[-64:].strip(b"\0").decode(errors="replace"),
            }
        else:
            fields[name] = value.decode()
    return fields
