"""Headers by which coding agents say whose turn a request is; unknown values say nothing."""

from collections.abc import Mapping
from typing import Final

from gateway.contracts.fields import label_or_none

_SESSION: Final = b"x-claude-code-session-id"
_CLASS: Final = b"x-claude-code-request-class"


def agent_session(headers: Mapping[bytes, bytes]) -> str | None:
    """The agent's session: its requests share a prefix, and go to one worker."""
    return label_or_none(headers.get(_SESSION, b"").decode("latin-1").strip())


def is_auxiliary(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the request is work next to the conversation, such as a title; a person's turn goes first."""
    return headers.get(_CLASS, b"").strip().lower() == b"auxiliary"
