"""Headers by which coding agents say whose turn a request is; unknown values say nothing."""

from collections.abc import Mapping
from typing import Final

from gateway.contracts.fields import label_or_none

_SESSION: Final = b"x-claude-code-session-id"
_CLASS: Final = b"x-claude-code-request-class"


def agent_turn(headers: Mapping[bytes, bytes]) -> tuple[str | None, bool]:
    """The agent's session, whose requests share a prefix and go to one worker; and whether the request is
    work next to the conversation, such as a title: a person's turn goes first.
    """
    session = label_or_none(headers[_SESSION].decode("latin-1").strip()) if _SESSION in headers else None
    return session, headers.get(_CLASS, b"").strip().lower() == b"auxiliary"
