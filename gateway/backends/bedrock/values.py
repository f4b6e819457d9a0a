"""What the parts of the Bedrock backend hand to each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Guardrail:
    """A guardrail of the account, by its id (or ARN) and version (a number, or ``DRAFT``)."""

    guardrail_id: str
    version: str


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Some of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ConverseStop:
    """Why the model ended, in Bedrock's words."""

    reason: str


@dataclass(frozen=True, slots=True)
class ConverseUsage:
    """What Bedrock counted. Its ``inputTokens`` leave out what was read from and written to the cache.

    ``latency_ms`` is the time that Bedrock itself took.
    """

    fresh_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int
    output_tokens: int
    latency_ms: int

    @property
    def input_tokens(self) -> int:
        """The whole prompt."""
        return self.fresh_tokens + self.cache_read_tokens + self.cache_write_tokens


Event = TextPiece | ConverseStop | ConverseUsage
