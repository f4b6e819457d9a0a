"""How many tokens an image takes in a prompt."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from budgeting.values import Message


@dataclass(frozen=True, slots=True)
class ImageCost:
    """A model's formula: the image is resized, then each square of ``unit`` pixels a side is some tokens.

    It is scaled down to ``max_edge`` (the longer side), ``max_short_edge`` and ``max_pixels``, or up to
    ``min_edge`` (the longer side) and ``min_pixels``. ``row_tokens`` are added for each row of squares,
    ``base_tokens`` for the image. The defaults are those of Qwen2-VL and Qwen2.5-VL.
    """

    unit: int = 28
    unit_tokens: int = 1
    row_tokens: int = 0
    base_tokens: int = 2
    min_pixels: int = 3_136
    max_pixels: int = 12_845_056
    min_edge: int = 0
    max_edge: int = 1_000_000
    max_short_edge: int = 1_000_000

    def tokens(self, width: int, height: int) -> int:
        """The tokens of an image of this size in pixels: an upper bound, parts of squares are whole ones."""
        longer, shorter, pixels = max(width, height), min(width, height), width * height
        most = min(self.max_edge / longer, self.max_short_edge / shorter, math.sqrt(self.max_pixels / pixels))
        least = max(self.min_edge / longer, math.sqrt(self.min_pixels / pixels))
        scale = min(most, max(1.0, least))
        # Rounded first: 1,120 pixels that became 1,120.0000000001 are 40 squares of 28.
        columns, rows = (max(1, math.ceil(round(side * scale / self.unit, 6))) for side in (width, height))
        return self.base_tokens + rows * (columns * self.unit_tokens + self.row_tokens)

    def of(self, messages: Iterable[Message]) -> int:
        """The tokens of all images that were read."""
        images = [one for message in messages if message.parts for one in message.images]
        return sum([self.tokens(one.width, one.height) for one in images])


DEFAULT_COST = ImageCost()
