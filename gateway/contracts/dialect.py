"""The port between a public contract and the HTTP edge: parse a body, write the answers."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from budgeting.values import Plan
from gateway.contracts.answer import Answer, BudgetReport
from gateway.contracts.events import Delta
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.values import GenerateRequest
from gateway.errors import PublicError

Header = tuple[bytes, bytes]


class ParsedRequest(Struct, frozen=True):
    """A parsed request, and options that only affect the answer's format.

    ``token_ids``: whether each chunk of a stream contains the ids of its tokens; ``running_usage``: the usage
    so far. ``further``: the requests of the body's other prompts; their choices follow those of ``request``.
    ``hides_reasoning``: whether a chat's answer leaves its reasoning out.
    """

    request: GenerateRequest
    include_usage: bool = False
    token_ids: bool = False
    further: tuple[GenerateRequest, ...] = ()
    running_usage: bool = False
    hides_reasoning: bool = False


TrimReport = Plan | BudgetReport  # reports which parts of the conversation the prompt leaves out


class Frames(Protocol):
    """The server-sent events of one stream, as bytes ready to send."""

    @property
    def opening(self) -> bytes:
        """Bytes to send before the first event; may be empty."""

    @property
    def ping(self) -> bytes:
        """Bytes to send while the answer is silent; empty if the contract has no pings."""

    @property
    def around(self) -> tuple[bytes, bytes] | None:
        """What precedes and follows the JSON string of a plain text of the first choice; ``None`` unless it
        is the same for all.
        """

    def delta(self, delta: Delta) -> bytes:
        """A piece of a choice's text."""

    def event(self, event: Delta) -> bytes:
        """An event other than text; empty if the contract cannot express it."""

    def finish(self, answer: Answer) -> bytes:
        """The last bytes of a complete answer."""

    def fail(self, error: PublicError, request_id: str) -> bytes:
        """The last bytes of an answer that failed after its beginning was sent."""


class ContractDialect(Protocol):
    """Parses the bodies and writes the answers of one public contract."""

    def parse(self, body: bytes, origin: RequestOrigin) -> ParsedRequest:
        """Parse a body. Raises InvalidRequest (InvalidJson if the body is not JSON)."""

    def whole(self, asked: ParsedRequest, answer: Answer) -> bytes:
        """The JSON body of an answer that is not streamed."""

    def headers(self, report: TrimReport) -> Sequence[Header]:
        """Headers that the contract adds to an answer, whole or streamed.

        ``x-sluice-trimmed`` has the numbers of turns and chunks left out; it is absent if nothing was. Chunk
        ids are the caller's text and stay in the body (``sluice.budget``).
        """
        if not (report.dropped_turns or report.dropped_chunks or report.cut_chunks):
            return ()
        cut = f", cut={len(report.cut_chunks)}" if report.cut_chunks else ""
        trimmed = f"turns={report.dropped_turns}, chunks={len(report.dropped_chunks)}{cut}"
        return ((b"x-sluice-trimmed", trimmed.encode()),)

    def frames(
        self, asked: ParsedRequest, model: str | None = None, plan: Plan | None = None, cached_tokens: int = 0
    ) -> Frames:
        """The frames of a stream. ``model`` (that answers) and ``plan`` (the prompt) are given once known;
        ``cached_tokens`` is the number that the first piece reports.
        """

    def error(self, error: PublicError, request_id: str) -> tuple[int, bytes]:
        """HTTP status and JSON body of an error."""
