"""The records of the stream ``routing``."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from gateway.routing.change import weights_of, with_weights
from gateway.state.port import Record

CANARY = "canary"  # the action of a canary's own changes


@dataclass(frozen=True, slots=True)
class CanaryShare:
    """An unfinished canary: its route, and the route's weights without it."""

    route: str
    before: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Draft:
    """A configuration that may become a revision.

    Args:
        canary: the unfinished canary that has a share of a route, if any.
        action: ``seed``, ``apply``, ``weights``, ``promote``, ``rollback`` or ``canary``.
    """

    config: Mapping[str, Any]
    comment: str
    action: str
    canary: CanaryShare | None = None

    @property
    def settled(self) -> Mapping[str, Any]:
        """The configuration without the share of an unfinished canary."""
        if self.canary is None or self.canary.route not in self.config["routes"]:
            return self.config
        return with_weights(self.config, self.canary.route, self.canary.before)

    def beside(self, last: "Draft") -> Mapping[str, Any]:
        """The configuration to go back to from ``last``: without the share of a canary that was unfinished.

        A canary that still runs keeps its share, unless its own step is the last change: then that is undone.
        """
        canary = last.canary
        if canary is None or canary != self.canary or last.action == CANARY:
            return self.settled
        if canary.route not in self.config["routes"]:
            return self.config
        return with_weights(self.config, canary.route, weights_of(last.config, canary.route))


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored revision; ``number`` 0 is the routing file, which is not in the stream yet."""

    number: int
    at: float
    author: str
    parent: int
    draft: Draft


def to_data(draft: Draft, parent: int) -> bytes:
    canary = {} if draft.canary is None else {"canary": asdict(draft.canary)}
    return orjson.dumps(
        {"config": draft.config, "comment": draft.comment, "action": draft.action, "parent": parent, **canary}
    )


def from_record(record: Record) -> Stored:
    """Decode a record. Raises KeyError, TypeError or ValueError if it cannot be decoded."""
    data = orjson.loads(record.data)
    share = data.get("canary")
    canary = None if share is None else CanaryShare(str(share["route"]), dict(share["before"]))
    draft = Draft(dict(data["config"]), str(data["comment"]), str(data["action"]), canary)
    return Stored(record.number, record.at, record.author, int(data["parent"]), draft)
