"""Images in messages, alike in every contract."""

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from budgeting.values import ImageContent, Message, Role
from gateway.contracts.features import Feature
from gateway.contracts.refusals import not_allowed

_IMAGES: Final = frozenset({Feature.IMAGES})


def with_parts(message: Message, parts: Sequence[str | ImageContent]) -> Message:
    """The message, with its whole content where that has images.

    Raises InvalidRequest: an image that is not the user's.
    """
    image = next((part for part in parts if isinstance(part, ImageContent)), None)
    if image is None:
        return message
    if message.role is not Role.USER:
        raise not_allowed(image.param, f"is an image of '{message.role.value}'", "images of 'user'")
    return replace(message, parts=tuple([part for part in parts if part]))


def said(parts: Sequence[str | ImageContent]) -> Message:
    """A message of the user."""
    return with_parts(Message(Role.USER, "".join([part for part in parts if isinstance(part, str)])), parts)


def joined(first: Message, second: Message, gap: str) -> Message:
    """Two messages of the user as one."""
    content = f"{first.content}{gap}{second.content}"
    if not (first.parts or second.parts):
        return replace(first, content=content)
    parts = [*(first.parts or (first.content,)), gap, *(second.parts or (second.content,))]
    return replace(first, content=content, parts=tuple([part for part in parts if part]))


def image_features(messages: Sequence[Message]) -> frozenset[Feature]:
    """What a backend must have for the images of a conversation."""
    return _IMAGES if [one for one in messages if one.parts] else frozenset()


def holds_data(messages: Sequence[Message]) -> bool:
    """Whether an image itself is in the body, not its address."""
    return any(image.url.startswith("data:") for one in messages if one.parts for image in one.images)


def refuse_images(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages. Raises InvalidRequest: one has an image, where only texts are counted."""
    for message in messages:
        if message.images:
            raise not_allowed(message.images[0].param, "is an image, which is not counted here", "text")
    return messages
