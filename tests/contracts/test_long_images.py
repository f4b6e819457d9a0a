"""A long image is not copied out of the body: the request has a mark in its place, and is otherwise the same."""

from __future__ import annotations

import json
import time
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.contracts.dialect import ParsedRequest
from gateway.contracts.images import LONG_BYTES, ImageData, parse_around_images
from gateway.contracts.messages.stream import MessagesDialect
from gateway.contracts.native_answer import NativeDialect
from gateway.contracts.openai_stream import OpenAIDialect
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.responses.stream import ResponsesDialect
from gateway.contracts.values import Caller, CallerRole
from gateway.errors import InvalidRequest

ORIGIN = RequestOrigin("req", "gen", Caller("acme", CallerRole.CALLER, "key"), 0.0, 0, "a" * 32)
LONG = "A" * (LONG_BYTES + 4)
PREFIX = "data:image/png;base64,"
Parse = Callable[[bytes, RequestOrigin], ParsedRequest]


def chat(*images: str, **fields: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": PREFIX + data}} for data in images]
    return {
        "model": "m",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "This?"}, *parts]}],
        **fields,
    }


def messages(data: str) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": data}
    content = [{"type": "text", "text": "This?"}, {"type": "image", "source": source}]
    return {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}


def responses(data: str) -> dict[str, Any]:
    content = [
        {"type": "input_text", "text": "This?"},
        {"type": "input_image", "image_url": PREFIX + data},
    ]
    return {"model": "m", "input": [{"role": "user", "content": content}]}


CHAT = OpenAIDialect(chat=True).parse


async def parsed(parse: Parse, body: bytes) -> ParsedRequest:
    async def read(data: bytes) -> ParsedRequest:
        return parse(data, ORIGIN)

    return await parse_around_images(body, read)


def urls_of(asked: ParsedRequest) -> list[str]:
    return [image.url for image in asked.request.messages[0].images]


@pytest.mark.parametrize(
    ("parse", "body"),
    [
        (CHAT, chat(LONG)),
        (NativeDialect().parse, {"messages": chat(LONG)["messages"]}),
        (MessagesDialect().parse, messages(LONG)),
        (ResponsesDialect().parse, responses(LONG)),
    ],
    ids=["chat", "native", "messages", "responses"],
)
@pytest.mark.parametrize("indent", [None, 2])
async def test_every_contract_leaves_a_long_image_in_the_body(
    parse: Parse, body: dict[str, Any], indent: int | None
) -> None:
    data = json.dumps(body, indent=indent).encode()
    asked = await parsed(parse, data)
    [(mark, image)] = asked.request.images.items()
    assert bytes(image) == LONG.encode() and image.obj is data
    assert urls_of(asked) == [PREFIX + mark] and len(mark) < 32
    plain = parse(data, ORIGIN).request.messages
    [turn] = asked.request.messages
    assert plain == (replace(turn, parts=(turn.parts[0], replace(turn.images[0], url=PREFIX + LONG))),)


async def test_a_long_image_is_left_in_the_body_if_its_url_is_written_in_capitals() -> None:
    body = json.dumps(chat(LONG)).replace("data:image", "DATA:image").encode()
    asked = await parsed(CHAT, body)
    [(mark, image)] = asked.request.images.items()
    assert bytes(image) == LONG.encode()
    assert urls_of(asked) == [f"DATA:image/png;base64,{mark}"]


async def test_several_long_images_have_marks_of_their_own_and_short_ones_none() -> None:
    body = json.dumps(chat(LONG, "AAAA", LONG[:-4] + "BBBB")).encode()
    asked = await parsed(CHAT, body)
    marks = [url.removeprefix(PREFIX) for url in urls_of(asked)]
    found = [bytes(asked.request.images.get(mark, b"short")[-4:]) for mark in marks]
    assert found == [b"AAAA", b"hort", b"BBBB"] and len(asked.request.images) == 2


@pytest.mark.parametrize(
    "body",
    [
        json.dumps(chat(LONG.replace("AAA", "AA/"))).replace("/", "\\/"),  # as PHP writes a slash
        json.dumps(chat(LONG, metadata={"url": PREFIX + LONG})),
        json.dumps(chat("AAAA", metadata={"data": LONG})),
        json.dumps({"model": "m", "messages": [{"role": "user", "content": json.dumps(chat(LONG))}]}),
    ],
    ids=["escaped", "both", "elsewhere", "quoted"],
)
async def test_a_body_whose_images_cannot_be_marked_is_parsed_whole(body: str) -> None:
    asked = await parsed(CHAT, body.encode())
    assert not asked.request.images
    unlike = asked != CHAT(body.encode(), ORIGIN)
    assert not unlike


async def test_a_body_with_a_long_image_is_refused_in_the_same_words_as_without_marks() -> None:
    for body in (json.dumps(chat(LONG, top_p=2)).encode(), json.dumps(chat(LONG)).encode()[:-1]):
        with pytest.raises(InvalidRequest) as plain:
            CHAT(body, ORIGIN)
        with pytest.raises(InvalidRequest) as refused:
            await parsed(CHAT, body)
        assert refused.value.message == plain.value.message


async def test_a_body_of_short_strings_is_not_looked_through_one_by_one() -> None:
    body = b'{"data":"",' * 2_000_000
    started = time.perf_counter()
    with pytest.raises(InvalidRequest):
        await parse_around_images(body, refuse)
    assert time.perf_counter() - started < 1.0, (
        "5 s for a search for each of them, 1 ms for a look at every 64 KiB"
    )


async def refuse(body: bytes) -> ParsedRequest:
    raise InvalidRequest("no")


def test_an_image_is_written_in_pieces_of_the_length_that_it_says() -> None:
    for size in (0, 1, 2, 3, 500_000, 589_824):
        data = bytes(range(256)) * (size // 256) + bytes(size % 256)
        given = ImageData("image/png", memoryview(b64encode(data)), in_base64=True)
        for image in (given, ImageData("image/png", memoryview(data))):
            assert b"".join(image.base64()) == b64encode(data)
            assert image.base64_length == len(b64encode(data)) and image.decoded() == data
