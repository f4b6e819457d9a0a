"""Which requests are shadowed, and the line in which their copies wait. Sans I/O."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from adapters.values import Adapter
from budgeting.values import Plan
from gateway.contracts.values import Answer, GenerateRequest
from gateway.routing.rank import stable_fraction
from gateway.routing.target import Target


class ShadowOutcome(StrEnum):
    """What became of a request that the sample chose; stable codes of the metrics."""

    COMPARED = "compared"
    FAILED = "failed"  # the other backend failed; that is a finding, and kept
    QUEUE_FULL = "queue_full"
    TOO_OLD = "too_old"  # no idle capacity came within its deadline
    SPEND = "spend"
    UNABLE = "unable"  # the other backend cannot do what was asked
    REDACTION_FAILED = "redaction_failed"
    REFUSED = "refused"  # by the other backend's admission
    DEFECT = "defect"


@dataclass(frozen=True, slots=True)
class Copy:
    """What is needed to ask again, and to compare: nothing that the request itself held.

    Args:
        backend: whom to ask.
        adapter: the one that answered.
        made_at: on the gateway's clock.
    """

    request: GenerateRequest
    target: Target
    plan: Plan
    answer: Answer
    adapter: Adapter | None
    backend: str
    made_at: float

    @property
    def size_bytes(self) -> int:
        """About what it keeps in memory: its texts (4 bytes a character at most) and token ids."""
        prompt = sum(len(message.content) for message in self.plan.messages)
        evidence = sum(len(chunk.text) for chunk in self.request.chunks)
        return 4 * (prompt + evidence + len(self.answer.output_text)) + 36 * len(self.plan.token_ids)


def chosen(generation_id: str, sample: float) -> bool:
    """Whether the sample holds this generation: the same on every process, for whoever asks."""
    return stable_fraction("shadow", generation_id) < sample


class ShadowQueue:
    """Copies in order of arrival; when it is full, the newest is let go.

    Args:
        most: copies that may wait.
        most_bytes: that they may take together.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._copies: deque[tuple[Copy, int]] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        """Copies that wait."""
        return len(self._copies)

    @property
    def size_bytes(self) -> int:
        """What they take."""
        return self._bytes

    def offer(self, copy: Copy) -> bool:
        """Take a copy; ``False`` when there is no room."""
        size = copy.size_bytes
        if len(self._copies) >= self._most or self._bytes + size > self._most_bytes:
            return False
        self._copies.append((copy, size))
        self._bytes += size
        return True

    def take(self) -> Copy | None:
        """The oldest."""
        if not self._copies:
            return None
        copy, size = self._copies.popleft()
        self._bytes -= size
        return copy
