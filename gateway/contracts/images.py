"""Images in messages, handled the same way in every contract."""

import re
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from secrets import token_hex
from typing import Annotated, Final, Literal

from msgspec import Struct
from msgspec.structs import replace
from pydantic import AfterValidator

from budgeting.values import ImageContent, Message, Role
from gateway.contracts.dialect import ParsedRequest
from gateway.contracts.features import Feature
from gateway.contracts.fields import StrictObject, Text
from gateway.contracts.refusals import not_allowed, required
from gateway.errors import InvalidRequest

LONG_BYTES: Final = 65_536
"""A longer image is not parsed but left in the body: parsing one of 20 MB takes 40 ms and copies it."""
_PIECE_BYTES: Final = 3 << 16  # bytes that are encoded as base64 at a time, which takes 0.2 ms
ImageDetail = Literal["auto", "low", "high", "original"]
_IMAGES: Final = frozenset({Feature.IMAGES})
_parts: Final = attrgetter("parts")
# Matches what precedes an image: the name of a contract's field, up to the quote that begins its string.
# The end of another string cannot match, since quotes inside strings are escaped.
_FIELD: Final = re.compile(rb'"(?:(?:image_)?url|(data))"\s{0,32}+:\s{0,32}+"\Z')
_FIELD_BYTES: Final = 96
_PREFIX: Final = re.compile(rb'(?i:data:[^",\\]{1,128};base64,)')
_MARK: Final = f"*{token_hex(8)}."  # base64 contains no asterisk, and no caller can guess the random part


class ImageData(Struct, frozen=True):
    """An image's bytes as received: base64 from a request's body, raw bytes if they were fetched."""

    media_type: str
    data: memoryview
    in_base64: bool = False

    @property
    def base64_length(self) -> int:
        return len(self.data) if self.in_base64 else (len(self.data) + 2) // 3 * 4

    def base64(self) -> Iterator[bytes | memoryview]:
        for at in range(0, len(self.data), _PIECE_BYTES):
            piece = self.data[at : at + _PIECE_BYTES]
            yield piece if self.in_base64 else b64encode(piece)

    def decoded(self) -> bytes:
        return b64decode(self.data) if self.in_base64 else bytes(self.data)


async def parse_around_images(
    body: bytes, parse: Callable[[bytes], Awaitable[ParsedRequest]]
) -> ParsedRequest:
    """Parse a body with short marks in place of its long images; ``images`` of the request has them by mark.

    The original body is parsed if the one with marks is refused, or if a mark is found outside an image.
    Raises what ``parse`` raises.
    """
    short, images = _marked(body)
    if not images:
        return await parse(body)
    try:
        asked = await parse(short)
    except InvalidRequest:
        return await parse(body)
    urls = [image.url.rpartition(",")[2] for one in asked.request.messages for image in one.images]
    if sorted([url for url in urls if url.startswith(_MARK)]) != sorted(images):
        return await parse(body)
    return replace(asked, request=replace(asked.request, images=images))


def _marked(body: bytes) -> tuple[bytes, Mapping[str, memoryview]]:
    """The body with marks in place of long images, and the images by mark."""
    images: dict[str, memoryview] = {}
    pieces: list[bytes | memoryview] = []
    view, done, quote = memoryview(body), 0, 0
    # A long string that begins within LONG_BYTES after ``quote`` contains ``quote + LONG_BYTES``: one search
    # there is enough, however many short strings there are.
    while (end := body.find(b'"', quote + LONG_BYTES)) >= 0:
        start = body.rfind(b'"', quote, quote + LONG_BYTES) + 1
        quote = end
        long = end - start > LONG_BYTES
        field = _FIELD.search(body[max(0, start - _FIELD_BYTES) : start]) if long else None
        if field is None:
            continue
        if field[1] is None:
            if not (prefix := _PREFIX.match(body, start)):
                continue
            start = prefix.end()
        if body.find(b"\\", start, end) < 0:
            mark = f"{_MARK}{len(images)}"
            images[mark] = view[start:end]
            pieces += [view[done:start], mark.encode()]
            done = end
    return b"".join([*pieces, view[done:]]) if images else body, images


def _with_scheme(url: str) -> str:
    # What follows is checked when the image is read; a blank before ``data:`` would hide the image's data.
    if not url[:8].lower().startswith(("https://", "http://", "data:")):
        raise ValueError("allowed: one that begins with https://, http:// or data:")
    return url


ImageUrlText = Annotated[Text, AfterValidator(_with_scheme)]


class ImageUrlBody(StrictObject):
    """Where an image is: an address, or a ``data:`` URL that holds it."""

    url: ImageUrlText
    detail: ImageDetail | None = None


class PartBody(StrictObject):
    """A part of a message: a text, or an image in a user's message or a tool's result.

    ``type`` is ``text`` or ``image_url``; a contract's further ones are converted before parts are read.
    """

    type: str
    text: Text | None = None
    image_url: ImageUrlBody | None = None


def read_content(
    content: str | Sequence[PartBody] | None, at: str
) -> tuple[str | None, Sequence[str | ImageContent]]:
    """The text of a message's content, and its parts in order where it has parts.

    Raises InvalidRequest: a part lacks the field that its type names.
    """
    if content is None or isinstance(content, str):
        return content, ()
    parts: list[str | ImageContent] = []
    for number, part in enumerate(content):
        where = f"{at}.content.{number}.{part.type}"
        if part.type == "text":
            parts.append(required(part.text, where))
        else:
            image = required(part.image_url, where)
            parts.append(ImageContent(image.url, image.detail, f"{where}.url"))
    return "".join([part for part in parts if isinstance(part, str)]), parts


def with_parts(message: Message, parts: Sequence[str | ImageContent]) -> Message:
    """The message, with all its parts if one is an image.

    Raises InvalidRequest: an image that is neither the user's nor a tool's.
    """
    image = next((part for part in parts if isinstance(part, ImageContent)), None)
    if image is None:
        return message
    if message.role not in (Role.USER, Role.TOOL):
        raise not_allowed(
            image.param, f"is an image of '{message.role.value}'", "images in messages of 'user' and 'tool'"
        )
    return replace(message, parts=tuple([part for part in parts if part]))


def made_of_parts(
    parts: Sequence[str | ImageContent], role: Role = Role.USER, tool_call_id: str | None = None
) -> Message:
    text = "".join([part for part in parts if isinstance(part, str)])
    return with_parts(Message(role, text, tool_call_id=tool_call_id), parts)


def join_messages(messages: Sequence[Message], gap: str) -> Message:
    """The first message with the contents of all of them."""
    text = gap.join([one.content for one in messages])
    first = next((number for number, one in enumerate(messages) if one.parts), None)
    if first is None:
        return replace(messages[0], content=text)
    before = gap.join([one.content for one in messages[:first]])
    parts = [before, gap if first else "", *messages[first].parts]
    for one in messages[first + 1 :]:
        parts += [gap, *(one.parts or (one.content,))]
    return replace(messages[0], content=text, parts=tuple([part for part in parts if part]))


def image_features(messages: Sequence[Message]) -> frozenset[Feature]:
    return _IMAGES if any(map(_parts, messages)) else frozenset()


def is_data_url(url: str) -> bool:
    """Whether a URL is an image's data; a scheme may be written in capitals."""
    return url[:5].lower() == "data:"


def holds_data(messages: Sequence[Message]) -> bool:
    """Whether the body contains an image's data, not only its address."""
    return any(is_data_url(image.url) for one in messages if one.parts for image in one.images)


def refuse_images(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages. Raises InvalidRequest: one has an image, whose tokens cannot be counted here."""
    for message in messages:
        if message.images:
            raise not_allowed(message.images[0].param, "is an image, which is not counted here", "text")
    return messages
