"""``/v1/audio``: transcriptions and translations of recordings, made by workers."""

from typing import Final

from fastapi import Request, Response
from starlette.datastructures import FormData, UploadFile
from starlette.types import Receive, Scope, Send

from gateway.contracts.audio import AudioRequest, Task, audio_request, no_event, transcript_body
from gateway.contracts.openai_answer import error_json
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.refusals import not_allowed
from gateway.errors import BodyTooLarge, public_error
from gateway.http.body import read_form
from gateway.http.disconnect_watch import until_gone
from gateway.http.exchange import Exchange, Reply
from gateway.http.generate import in_time, origin_of
from gateway.http.idempotency import CallerRequest, CallerRequestDep
from gateway.http.respond import CALLER_ERRORS, response_of
from gateway.http.routes import CreationRoute, callers_router, form_of
from gateway.http.sinks import STREAM_HEADERS

HEAD_BYTES: Final = 32  # bytes of a recording's beginning that are read to estimate its length

router = callers_router(CreationRoute, 400, 401, 403, 404, 409, 413, 429, 503, 504, prefix="/v1/audio")


@router.post("/transcriptions", openapi_extra=form_of("model"))
async def transcriptions(request: Request, call: CallerRequestDep) -> Response:
    """Text of a recording in its own language; the body is a form with ``file``, ``model``, and options."""
    return await _answer("transcriptions", request, call)


@router.post("/translations", openapi_extra=form_of("model"))
async def translations(request: Request, call: CallerRequestDep) -> Response:
    """The text of a recording in English, or in ``to_language``."""
    return await _answer("translations", request, call)


async def _answer(task: Task, request: Request, call: CallerRequest) -> Response:
    services, exchange = call.exchange.services, call.exchange
    most = services.limits.max_audio_bytes
    with services.recordings.holding(call.exchange.tenant) as arrived:
        form = await in_time(services, read_form(request, most, arrived))
        try:
            asked = await _asked(task, form, most, origin_of(exchange))
            async with until_gone(exchange, request.receive) as release:
                if asked.recording.stream:
                    exchange.reported = True
                    return await _stream(asked, exchange)

                async def run() -> Reply:
                    exchange.reported = True
                    answer = await in_time(services, services.embeddings.transcribe(asked, no_event))
                    release()
                    body, media_type = transcript_body(asked, answer.results[0] or {})
                    return Reply(200, body, media_type)

                reply = await call.once_of(form, run, lambda: services.embeddings.may_ask(asked))
                return response_of(reply)
        finally:
            await form.close()


async def _asked(task: Task, form: FormData, most: int, origin: RequestOrigin) -> AudioRequest:
    upload = form.get("file")
    if not isinstance(upload, UploadFile):
        raise not_allowed("file", "is missing or is not a file", "one file")
    size = upload.size or 0
    if size > most:
        raise BodyTooLarge(f"the file is larger than {most} bytes", param="file")
    head = await upload.read(HEAD_BYTES)
    fields = [(name, value) for name, value in form.multi_items() if isinstance(value, str)]
    return audio_request(
        task, fields, upload.file, size, upload.filename or "", upload.content_type or "", head, origin
    )


async def _stream(asked: AudioRequest, exchange: Exchange) -> Response:
    """Send the worker's events as they arrive; the status 200 is sent with the first one."""

    async def send(event: bytes) -> None:
        if not exchange.started:
            await exchange.start(200, STREAM_HEADERS)
        await exchange.body(b"data: " + event.replace(b"\n", b"\ndata: ") + b"\n\n", more=True)

    try:
        await in_time(exchange.services, exchange.services.embeddings.transcribe(asked, send))
        await send(b"[DONE]")
    except CALLER_ERRORS as error:
        if not exchange.started:
            raise
        exchange.error = public_error(error)
        await send(error_json(exchange.error, exchange.request_id)[1])
    await exchange.body(b"", more=False)
    return _Sent()


class _Sent(Response):
    """A response for FastAPI after the answer was sent."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send nothing."""
