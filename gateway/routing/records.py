"""The records of the stream ``routing``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.state.port import Record


@dataclass(frozen=True, slots=True)
class Draft:
    """A configuration that may become a revision.

    Args:
        action: ``seed``, ``apply``, ``weights``, ``promote``, ``rollback`` or ``canary``.
    """

    config: Mapping[str, Any]
    comment: str
    action: str


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored revision; ``number`` 0 is the routing file's, which is not in the stream yet."""

    number: int
    at: float
    author: str
    parent: int
    draft: Draft


def to_data(draft: Draft, parent: int) -> bytes:
    """A record's content."""
    return orjson.dumps(
        {"config": draft.config, "comment": draft.comment, "action": draft.action, "parent": parent}
    )


def from_record(record: Record) -> Stored:
    """Decode a record. Raises KeyError, TypeError, ValueError when it is not understood."""
    data = orjson.loads(record.data)
    draft = Draft(dict(data["config"]), str(data["comment"]), str(data["action"]))
    return Stored(record.number, record.at, record.author, int(data["parent"]), draft)
