"""Headers with which coding agents describe a request; unknown values have no effect."""

from collections.abc import Mapping
from typing import Final

from gateway.contracts.fields import label_or_none

_SESSION: Final = b"x-claude-code-session-id"
_CLASS: Final = b"x-claude-code-request-class"


def agent_turn(headers: Mapping[bytes, bytes]) -> tuple[str | None, bool]:
    """The agent's session id, and whether the request is auxiliary work, such as a title of the conversation.
    Requests of one session share a prefix and go to one worker. A person's turn precedes auxiliary work.
    """
    session = label_or_none(headers[_SESSION].decode("latin-1").strip()) if _SESSION in headers else None
    return session, headers.get(_CLASS, b"").strip().lower() == b"auxiliary"
