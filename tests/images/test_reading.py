"""A request's images are checked before its prompt is planned, and named by their hash from there on."""

from __future__ import annotations

import asyncio
import hashlib
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from budgeting.values import CanonicalPrompt, ImageContent, Message, Role
from gateway.config.images import ImagesSection
from gateway.contracts.features import Feature
from gateway.contracts.images import ImageData
from gateway.contracts.values import Caller, CallerRole, Contract, GenerateRequest
from gateway.errors import InvalidRequest
from gateway.images.fetch import Hold
from gateway.images.reading import ImageReader
from tests.images.samples import data_url, png, sample

CALLER = Caller("acme", CallerRole.CALLER, "key_1")
PNG = sample("png")


@contextmanager
def no_memory(tenant: str) -> Iterator[Hold]:
    """Fail on any hold: a ``data:`` URL is counted with the request's body."""

    def hold(size: int) -> None:
        raise AssertionError("the body is counted already")

    yield hold


def request_of(*urls: str) -> GenerateRequest:
    images = [
        ImageContent(url, None, f"messages.0.content.{at}.image_url.url") for at, url in enumerate(urls)
    ]
    return GenerateRequest(
        request_id="req",
        generation_id="gen",
        contract=Contract.CHAT,
        caller=CALLER,
        arrived_at=0.0,
        created=0,
        messages=(Message(Role.USER, "What?", parts=("What?", *images)),),
        needs=frozenset({Feature.IMAGES} if urls else ()),
    )


async def read(*urls: str, **bounds: int) -> tuple[CanonicalPrompt, Mapping[str, ImageData]]:
    request = request_of(*urls)
    prompt = CanonicalPrompt(turns=request.messages)
    with ImageReader(ImagesSection(**bounds), no_memory).of(request) as images:
        return await images.read(prompt, asyncio.to_thread), dict(images.data)


async def test_an_image_is_named_by_the_hash_of_its_bytes_and_its_size() -> None:
    prompt, found = await read(data_url(PNG), data_url(sample("jpeg"), "image/jpeg"), data_url(PNG))
    digests = [hashlib.sha256(data).hexdigest() for data in (PNG, sample("jpeg"), PNG)]
    [turn] = prompt.turns
    assert turn.parts == ("What?", *[ImageContent(width=5, height=3, sha256=one) for one in digests])
    assert {sha256: (one.media_type, one.decoded()) for sha256, one in found.items()} == {
        digests[0]: ("image/png", PNG),
        digests[1]: ("image/jpeg", sample("jpeg")),
    }


async def test_the_type_is_read_from_the_bytes_and_not_from_the_url() -> None:
    _, found = await read(data_url(PNG, "text/html;charset=utf-8"))
    assert [one.media_type for one in found.values()] == ["image/png"]


async def test_a_data_url_may_be_written_in_capitals() -> None:
    _, found = await read(data_url(PNG).replace("data:image/png;base64", "DATA:IMAGE/PNG;BASE64"))
    assert [one.decoded() for one in found.values()] == [PNG]


async def test_a_request_without_images_is_not_touched() -> None:
    prompt, found = await read()
    assert prompt.turns == request_of().messages and not found


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://example.org/abc.png", "is not a data: URL"),
        ("data:image/png,abc", "without base64"),
        ("data:" + "x" * 300 + ";base64,abcd", "without base64"),
        ("data:image/png;base64,a-_=", "not valid base64"),
        ("data:image/png;base64,abc", "not valid base64"),
        (data_url(b"<svg/>", "image/png"), "is no PNG"),
        (data_url(PNG + bytes(2000)), "is too large; allowed: 1024 bytes"),
        (data_url(png(50_000, 50_000)), "has 2500000000 pixels; allowed: 1000000"),
    ],
)
async def test_an_image_that_cannot_be_served_is_refused_by_its_place(url: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await read(data_url(PNG), url, max_bytes=1024, max_pixels=1_000_000)
    assert said in refused.value.message
    assert refused.value.param == "messages.0.content.1.image_url.url"
    assert "abc" not in refused.value.message


async def test_more_images_than_the_bound_are_refused() -> None:
    assert await read(*[data_url(PNG)] * 3, max_per_request=3)
    with pytest.raises(InvalidRequest, match="has 4 images; allowed: 3 or fewer"):
        await read(*[data_url(PNG)] * 4, max_per_request=3)


async def test_the_bound_of_bytes_is_of_the_image_and_not_of_its_base64() -> None:
    whole = PNG + bytes(1024 - len(PNG))
    assert await read("data:image/png;base64," + b64encode(whole).decode(), max_bytes=1024)


async def test_a_long_image_is_read_in_a_thread() -> None:
    threads = 0

    async def offload(work):  # type: ignore[no-untyped-def]
        nonlocal threads
        threads += 1
        return await asyncio.to_thread(work)

    for data in (PNG, PNG + bytes(100_000)):
        request = request_of(data_url(data))
        with ImageReader(ImagesSection(), no_memory).of(request) as images:
            await images.read(CanonicalPrompt(turns=request.messages), offload)
    assert threads == 1
