"""Images in messages, alike in every contract."""

from collections.abc import Iterable, Sequence
from typing import Final

from msgspec.structs import replace

from budgeting.values import ImageContent, Message, Role
from gateway.contracts.features import Feature
from gateway.contracts.refusals import not_allowed

_IMAGES: Final = frozenset({Feature.IMAGES})


def with_parts(message: Message, parts: Iterable[str | ImageContent]) -> Message:
    """The message with its whole content. Raises InvalidRequest: an image that is not the user's."""
    message = replace(message, parts=tuple([part for part in parts if part]))
    if message.role is not Role.USER:
        param = message.images[0].param
        raise not_allowed(param, f"is an image of '{message.role.value}'", "images of 'user'")
    return message


def image_features(messages: Sequence[Message]) -> frozenset[Feature]:
    """What a backend must have for the images of a conversation."""
    return _IMAGES if any(one.parts for one in messages) else frozenset()


def refuse_images(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages. Raises InvalidRequest: one has an image, where only texts are counted."""
    for message in messages:
        if message.images:
            raise not_allowed(message.images[0].param, "is an image, which is not counted here", "text")
    return messages
