"""How many tokens an image takes in a prompt."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from budgeting.values import Message


class ImageRounding(StrEnum):
    """How the length of a resized side becomes a number of squares."""

    NEAREST = "nearest"
    """Rounded to squares before the bounds in pixels are applied, as Qwen's processors do."""
    UP = "up"
    """A part of a square counts as a whole one."""
    UP_FROM_WHOLE_PIXELS = "up_from_whole_pixels"
    """Like UP, after rounding down to whole pixels, as Idefics3's and SmolVLM's processors do."""


@dataclass(frozen=True, slots=True)
class ImageCost:
    """A model's formula: the image is resized, then each square of ``unit`` pixels a side takes some tokens.

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
    rounding: ImageRounding = ImageRounding.NEAREST

    def tokens(self, width: int, height: int) -> int:
        longer, shorter = max(width, height), min(width, height)
        most = min(self.max_edge / longer, self.max_short_edge / shorter)
        scale = min(most, max(1.0, self.min_edge / longer))
        nearest = self.rounding is ImageRounding.NEAREST
        columns, rows = (self._nearest if nearest else self._up)(width * scale, height * scale)
        return self.base_tokens + max(1, rows) * (max(1, columns) * self.unit_tokens + self.row_tokens)

    def _nearest(self, width: float, height: float) -> tuple[int, int]:
        # The same steps in the same order as in the processors, so that no image gets other squares.
        unit, columns, rows = self.unit, round(width / self.unit), round(height / self.unit)
        if columns * rows * unit * unit > self.max_pixels:
            shrunk = math.sqrt(width * height / self.max_pixels)
            return math.floor(width / shrunk / unit), math.floor(height / shrunk / unit)
        if columns * rows * unit * unit < self.min_pixels:
            grown = math.sqrt(self.min_pixels / (width * height))
            return math.ceil(width * grown / unit), math.ceil(height * grown / unit)
        return columns, rows

    def _up(self, width: float, height: float) -> tuple[int, int]:
        pixels = width * height
        scale = min(math.sqrt(self.max_pixels / pixels), max(1.0, math.sqrt(self.min_pixels / pixels)))
        # Floating-point errors are removed first: 1,120.0000000001 pixels are 40 squares of 28.
        sides = [round(side * scale, 6) for side in (width, height)]
        if self.rounding is ImageRounding.UP_FROM_WHOLE_PIXELS:
            sides = [math.floor(side) for side in sides]
        columns, rows = (math.ceil(side / self.unit) for side in sides)
        return columns, rows

    def of(self, messages: Iterable[Message]) -> int:
        """The tokens of all images in the messages; their sizes must be known."""
        tokens = 0
        for message in messages:
            if message.parts:
                tokens += sum([self.tokens(one.width, one.height) for one in message.images])
        return tokens


DEFAULT_COST = ImageCost()
