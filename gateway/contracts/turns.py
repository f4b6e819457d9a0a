"""What every conversation must be, whichever contract it came in by."""

from collections.abc import Sequence

from budgeting.values import Message, Role
from gateway.errors import InvalidRequest


def check_count(count: int, limit: int, field: str = "messages") -> None:
    """Refuse a conversation without messages, or with more than ``limit``."""
    if not 1 <= count <= limit:
        raise InvalidRequest(f"{field} has {count} items; allowed: 1 to {limit}", param=field)


def check_latest(messages: Sequence[Message]) -> None:
    """Refuse a conversation whose last message is not the user's, or is blank.

    Earlier messages may be empty: callers replay histories in which an answer was.
    """
    last = len(messages) - 1
    if messages[last].role is not Role.USER:
        param = f"messages.{last}.role"
        raise InvalidRequest(
            f"{param} is '{messages[last].role.value}'; allowed: 'user' in the last message", param=param
        )
    if not messages[last].content.strip():
        param = f"messages.{last}.content"
        raise InvalidRequest(f"{param} is blank; allowed: text in the last message", param=param)
