"""Stop strings of nothing but white space: models refuse them, so the answer is cut here."""

from __future__ import annotations

from collections.abc import Sequence


def told_to_bedrock(stops: Sequence[str]) -> list[str]:
    """The stop strings that a model takes; Claude answers any other with a ValidationException."""
    return [stop for stop in stops if stop.strip()]


class BlankStops:
    """Ends an answer before the first stop string of white space alone.

    Holds back no more than the white space at the end of the text, while a stop string may begin in it.

    Args:
        stops: the request's stop strings; those that Bedrock is told are left to it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple([stop for stop in stops if stop and not stop.strip()])
        self._held = ""
        self.reached = False

    def push(self, text: str) -> str:
        """What may be given of the next piece; nothing more once a stop string was ``reached``."""
        if not self._stops:
            return text
        if self.reached:
            return ""
        text, self._held = self._held + text, ""
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.reached = True
            return text[: min(found)]
        most = max((_partial_match(stop, text) for stop in self._stops), default=0)
        if most:
            text, self._held = text[:-most], text[-most:]
        return text

    def flush(self) -> str:
        """What is still held, when the answer has ended in another way."""
        held, self._held = self._held, ""
        return held


def _partial_match(stop: str, text: str) -> int:
    """Length of the longest proper prefix of ``stop`` that ``text`` ends with."""
    return next((size for size in range(len(stop) - 1, 0, -1) if text.endswith(stop[:size])), 0)
