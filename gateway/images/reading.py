"""Reads and checks a request's images before its prompt is planned."""

import hashlib
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final

from msgspec.structs import replace

from budgeting.plan import Offload
from budgeting.values import CanonicalPrompt, ImageContent, Message
from gateway.config.images import ImagesSection
from gateway.contracts.deadlines import until_deadline
from gateway.contracts.features import Feature
from gateway.contracts.images import ImageData, is_data_url
from gateway.contracts.refusals import not_allowed
from gateway.contracts.values import GenerateRequest
from gateway.images.address import BadAddress
from gateway.images.fetch import Hold, ImageFetcher
from gateway.images.header import ImageHeader, TruncatedImage, UnreadableImage, read_header
from resilience.task_groups import all_or_error

INLINE_BYTES: Final = 65_536  # an image of at most this size is read on the event loop, in 0.2 ms
_LATE: Final = "before its images had been read"
_MAX_PREFIX: Final = 256  # longest part of a ``data:`` URL before the base64, including the comma
_PIECE_CHARS: Final = 1 << 20
"""Characters of base64 that are decoded in one step: other threads run between two steps."""


@dataclass(frozen=True, slots=True)
class ImageReader:
    """Reads the images of requests.

    Args:
        holding: takes a tenant; the context in which the bytes that it fetches are counted.
        fetcher: fetches images from addresses; ``None``: only ``data:`` URLs are accepted.
        clock: requests' deadlines are times of this clock.
    """

    bounds: ImagesSection
    holding: Callable[[str], AbstractContextManager[Hold]]
    fetcher: ImageFetcher | None = None
    clock: Callable[[], float] = time.monotonic

    def of(self, request: GenerateRequest) -> AbstractContextManager["RequestImages"]:
        """Return a context manager of a request's images, which are in memory while its block runs."""
        if Feature.IMAGES not in request.needs:
            return _NONE
        return self._of(request)

    @contextmanager
    def _of(self, request: GenerateRequest) -> Iterator["RequestImages"]:
        with self.holding(request.caller.tenant) as hold:
            yield _Images(request, self, hold)


class RequestImages:
    """The images of one request, here none; after ``read``, ``data`` has their bytes by SHA-256."""

    data: Mapping[str, ImageData] = MappingProxyType({})

    async def read(self, prompt: CanonicalPrompt, offload: Offload) -> CanonicalPrompt:
        """Return the prompt with the images' sizes and hashes.

        Raises InvalidRequest for an unacceptable image; RateLimited, TooManyBodies, DeadlineExceeded.
        """
        return prompt


@dataclass(slots=True, eq=False)
class _Images(RequestImages):
    _request: GenerateRequest
    _reader: ImageReader
    _hold: Hold

    async def read(self, prompt: CanonicalPrompt, offload: Offload) -> CanonicalPrompt:
        images = [image for turn in prompt.turns for image in turn.images]
        if len(images) > (most := self._reader.bounds.max_per_request):
            raise not_allowed("messages", f"has {len(images)} images", f"{most} or fewer")
        async with until_deadline(self._request, self._reader.clock, _LATE), all_or_error() as group:
            tasks = [group.create_task(self._read(one, offload)) for one in images]
        read = {image.param: task.result() for image, task in zip(images, tasks, strict=True)}
        self.data = {image.sha256: data for image, data in read.values()}
        turns = [_with_images(turn, read) if turn.parts else turn for turn in prompt.turns]
        return replace(prompt, turns=tuple(turns))

    async def _read(self, image: ImageContent, offload: Offload) -> tuple[ImageContent, ImageData]:
        try:
            if is_data_url(image.url):
                data = self._in_body(image)
                size, work = len(data), partial(self._given, image, data)
            elif (fetcher := self._reader.fetcher) is None:
                raise BadAddress("is not a data: URL", "data:image/png;base64,…")
            else:
                fetched = await fetcher.fetch(image.url, self._request.caller.tenant, self._hold)
                size, work = len(fetched), partial(self._fetched, image, fetched)
            return work() if size <= INLINE_BYTES else await offload(work)
        except BadAddress as error:
            raise not_allowed(image.param, f"{error}", error.allowed) from None

    def _in_body(self, image: ImageContent) -> memoryview:
        """Return the base64 of an image in the request's body."""
        url, start = image.url, image.url.find(",", 0, _MAX_PREFIX) + 1
        if not url[:start].lower().endswith(";base64,"):
            raise not_allowed(image.param, "is a data: URL without base64", "data:image/png;base64,…")
        given = self._request.images.get(url[start:])
        data = memoryview(url[start:].encode()) if given is None else given
        if len(data) // 4 * 3 > (most := self._reader.bounds.max_bytes) + 2:
            raise not_allowed(image.param, "is too large", f"{most} bytes or fewer")
        return data

    def _given(self, image: ImageContent, data: memoryview) -> tuple[ImageContent, ImageData]:
        """Read an image of the body, decoded in pieces so that it is not in memory twice."""
        digest, first, size = hashlib.sha256(), b"", 0
        try:
            for at in range(0, len(data), _PIECE_CHARS):
                if size % 3:  # only the last piece may have padding
                    raise ValueError
                piece = b64decode(data[at : at + _PIECE_CHARS], validate=True)
                digest.update(piece)
                first, size = first or piece, size + len(piece)
        except ValueError:
            raise not_allowed(image.param, "is not valid base64", "base64 with its padding") from None
        header = self._header(image, first, lambda: b64decode(data))
        return _found(image, header, digest.hexdigest(), data, in_base64=True)

    def _fetched(self, image: ImageContent, data: bytes) -> tuple[ImageContent, ImageData]:
        header = self._header(image, data, lambda: data)
        return _found(image, header, hashlib.sha256(data).hexdigest(), memoryview(data), in_base64=False)

    def _header(self, image: ImageContent, first: bytes, whole: Callable[[], bytes]) -> ImageHeader:
        """Read the header of the bytes, whatever type the caller declared."""
        try:
            try:
                header = read_header(first)
            except TruncatedImage:
                header = read_header(whole())
        except UnreadableImage as error:
            allowed = "a PNG, JPEG, GIF or WebP with one picture"
            raise not_allowed(image.param, f"{error}", allowed) from None
        most = self._reader.bounds.max_pixels
        if (pixels := header.width * header.height) > most:
            raise not_allowed(image.param, f"has {pixels} pixels", f"{most} or fewer")
        return header


def _found(
    image: ImageContent, header: ImageHeader, sha256: str, data: memoryview, *, in_base64: bool
) -> tuple[ImageContent, ImageData]:
    """The image by its size and hash, without its address, and its data."""
    content = ImageContent("", image.detail, "", header.width, header.height, sha256)
    return content, ImageData(header.media_type, data, in_base64)


_NONE: Final = nullcontext(RequestImages())


def _with_images(turn: Message, read: Mapping[str, tuple[ImageContent, ImageData]]) -> Message:
    return replace(
        turn,
        parts=tuple([read[part.param][0] if isinstance(part, ImageContent) else part for part in turn.parts]),
    )
