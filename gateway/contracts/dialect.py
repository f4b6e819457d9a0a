"""The port between a public contract and the HTTP edge: parse a body, write the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.contracts.origin import Origin
from gateway.contracts.values import Answer, GenerateRequest, TokenLogprob
from gateway.errors import PublicError

Header = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Asked:
    """A parsed request, and what only the answer's form depends on."""

    request: GenerateRequest
    include_usage: bool = False


class Frames(Protocol):
    """The server-sent events of one stream, as bytes ready to send.

    ``opening`` goes out before the first of the others and may be empty.
    """

    @property
    def opening(self) -> bytes:
        """What a stream starts with."""

    def delta(self, text: str, index: int = 0, logprobs: Sequence[TokenLogprob] = ()) -> bytes:
        """One piece of one choice; ``logprobs`` has an entry a token when they were asked for."""

    def finish(self, answer: Answer) -> bytes:
        """The end of a whole answer."""

    def fail(self, error: PublicError, request_id: str, *, partial: bool) -> bytes:
        """The end of a broken one; ``partial`` when text went out before."""


class Dialect(Protocol):
    """One public contract."""

    def parse(self, body: bytes, origin: Origin) -> Asked:
        """Raises InvalidRequest (InvalidJson when the body is not JSON)."""

    def whole(self, asked: Asked, answer: Answer) -> bytes:
        """The JSON body of a whole answer."""

    def headers(self, answer: Answer) -> Sequence[Header]:
        """Headers that the contract adds to a whole answer."""

    def frames(self, asked: Asked) -> Frames:
        """The frames of a stream."""

    def error(self, error: PublicError, request_id: str) -> tuple[int, bytes]:
        """HTTP status and JSON body of an error."""
