"""``/v1/files``: OpenAI's files, which are uploaded to the storage without being held in memory."""

import asyncio
from typing import Annotated, Final, Literal

import orjson
from fastapi import Query, Request, Response
from starlette.datastructures import FormData, UploadFile
from starlette.responses import StreamingResponse

from accounting.batch_tables import FileRow
from gateway.batches.files import PURPOSES, expiry, file_body, shown
from gateway.contracts.batches import FileBody, FilesBody
from gateway.contracts.openai_answer import DeletedBody
from gateway.contracts.refusals import not_allowed, path_of
from gateway.errors import BodyTooLarge
from gateway.http.body import BodyTooSlow, read_form
from gateway.http.exchange import Reply
from gateway.http.idempotency import CallerRequestDep
from gateway.http.respond import json_of, page_of, response_of
from gateway.http.routes import CallerRoute, CreationRoute, ExchangeDep, callers_router, form_of
from gateway.ports import Services

MAX_FILENAME: Final = 255
FORM_FIELDS: Final = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")
UPLOAD_S: Final = 3_600.0  # longest time of an upload: 200 MiB at half a Mbit/s

router = callers_router(CallerRoute, 400, 401, 403, 404, 409, 413, 429, 503, prefix="/v1/files")
uploads = callers_router(CreationRoute, 400, 401, 403, 409, 413, 429, 503)


@uploads.post("/v1/files", response_model=FileBody, openapi_extra=form_of("purpose"))
async def upload(request: Request, call: CallerRequestDep) -> Response:
    """Store a file; the body is a form with ``file``, ``purpose`` and optionally ``expires_after``."""
    services, tenant = call.exchange.services, call.exchange.tenant
    most = services.files.section.max_file_bytes
    services.files.store  # noqa: B018 - refuses the upload before it is read if files are off
    with services.uploads.holding(tenant) as arrived:
        try:
            async with asyncio.timeout(UPLOAD_S):
                form = await read_form(request, most, arrived)
        except TimeoutError:
            raise BodyTooSlow(f"the file did not arrive within {UPLOAD_S:g} s") from None

        async def run() -> Reply:
            row = await _stored(services, tenant, form)
            return Reply(200, orjson.dumps(file_body(row)))

        try:
            return response_of(await call.once_of(form, run))
        finally:
            await form.close()


async def _stored(services: Services, tenant: str, form: FormData) -> FileRow:
    if repeated := [name for name in form if len(form.getlist(name)) > 1]:
        raise not_allowed(path_of([repeated[0]]), "is repeated", "once")
    file, texts = form.get("file"), {name: one for name, one in form.items() if isinstance(one, str)}
    if not isinstance(file, UploadFile):
        raise not_allowed("file", "is missing or is not a file", "one file")
    if (purpose := texts.get("purpose")) not in PURPOSES:
        raise not_allowed("purpose", shown(purpose), ", ".join(PURPOSES))
    if others := form.keys() - set(FORM_FIELDS):
        raise not_allowed(path_of([min(others)]), "is not a known field", ", ".join(FORM_FIELDS))
    expires_s = expiry(texts.get("expires_after[anchor]"), texts.get("expires_after[seconds]"))
    size, most = file.size or 0, services.files.section.max_file_bytes
    if size > most:
        raise BodyTooLarge(f"the file is larger than {most} bytes", param="file")
    name = (file.filename or "file")[:MAX_FILENAME].replace("\x00", "\ufffd")  # PostgreSQL stores no null
    file_id = services.new_id("file").replace("_", "-", 1)
    return await services.files.add(tenant, file_id, name, str(purpose), file.file, size, expires_s)


@router.get("", response_model=FilesBody)
async def list_files(
    exchange: ExchangeDep,
    purpose: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """The tenant's files."""
    rows = await exchange.services.files.page(
        exchange.tenant, after=after, limit=limit + 1, purpose=purpose, newest=order == "desc"
    )
    return page_of([file_body(row) for row in rows], limit)


@router.get("/{file_id}", response_model=FileBody)
async def show_file(file_id: str, exchange: ExchangeDep) -> Response:
    """One file's object, without its content."""
    return json_of(file_body(await exchange.services.files.get(exchange.tenant, file_id)))


@router.get("/{file_id}/content", response_class=StreamingResponse)
async def file_content(file_id: str, exchange: ExchangeDep) -> Response:
    """One file's content."""
    row = await exchange.services.files.get(exchange.tenant, file_id)
    content = await exchange.services.files.content(row)
    headers = {"content-length": str(row.bytes)}
    return StreamingResponse(content, headers=headers, media_type="application/octet-stream")


@router.delete("/{file_id}", response_model=DeletedBody)
async def delete_file(file_id: str, exchange: ExchangeDep) -> DeletedBody:
    """Delete a file; refused while a batch that has not ended reads it."""
    await exchange.services.files.delete(exchange.tenant, file_id)
    return {"id": file_id, "object": "file", "deleted": True}
