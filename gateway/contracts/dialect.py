"""The port between a public contract and the HTTP edge: parse a body, write the answers."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from budgeting.values import Plan
from gateway.contracts.events import Delta
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.values import Answer, BudgetReport, GenerateRequest, TokenLogprob
from gateway.errors import PublicError

Header = tuple[bytes, bytes]


class ParsedRequest(Struct, frozen=True):
    """A parsed request, and what only the answer's form depends on.

    ``token_ids``: each chunk of a stream has the ids of its tokens. ``further``: the requests of the body's
    other prompts, whose choices follow those of ``request``.
    """

    request: GenerateRequest
    include_usage: bool = False
    token_ids: bool = False
    further: tuple[GenerateRequest, ...] = ()


Cuts = Plan | BudgetReport
"""What a prompt left out."""


class Frames(Protocol):
    """The server-sent events of one stream, as bytes ready to send."""

    @property
    def opening(self) -> bytes:
        """What goes out before the first of the others; may be empty."""

    @property
    def ping(self) -> bytes:
        """What goes out while the answer is silent; empty where the contract has no place for it."""

    def delta(
        self,
        text: str,
        index: int = 0,
        logprobs: Sequence[TokenLogprob] = (),
        token_ids: Sequence[int] = (),
    ) -> bytes:
        """One piece of one choice; ``logprobs`` has an entry a token when they were asked for."""

    def event(self, event: Delta) -> bytes:
        """A piece that is not text; empty where the contract has no place for it."""

    def finish(self, answer: Answer) -> bytes:
        """The end of a whole answer."""

    def fail(self, error: PublicError, request_id: str, *, partial: bool) -> bytes:
        """The end of a broken one; ``partial`` when text went out before."""


class ContractDialect(Protocol):
    """One public contract."""

    def parse(self, body: bytes, origin: RequestOrigin) -> ParsedRequest:
        """Raises InvalidRequest (InvalidJson when the body is not JSON)."""

    def whole(self, asked: ParsedRequest, answer: Answer) -> bytes:
        """The JSON body of a whole answer."""

    def headers(self, cuts: Cuts) -> Sequence[Header]:
        """Headers that the contract adds to an answer, whole or streamed."""

    def frames(
        self, asked: ParsedRequest, model: str | None = None, plan: Plan | None = None, cached_tokens: int = 0
    ) -> Frames:
        """The frames of a stream; ``model`` and ``plan``: what answers, and to what, where it is known;
        ``cached_tokens``: those that the first piece names.
        """

    def error(self, error: PublicError, request_id: str) -> tuple[int, bytes]:
        """HTTP status and JSON body of an error."""
