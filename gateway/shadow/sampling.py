"""Selects the requests to shadow, and queues their copies. No I/O."""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from adapters.selection import stable_fraction
from adapters.values import Adapter
from budgeting.values import Plan
from gateway.contracts.answer import Answer
from gateway.contracts.values import GenerateRequest
from gateway.routing.target import Target


class ShadowOutcome(StrEnum):
    """The outcome of a request that the sample includes; stable codes of the metrics."""

    COMPARED = "compared"
    FAILED = "failed"  # the other backend failed; the pair is stored with its failure
    QUEUE_FULL = "queue_full"
    TOO_OLD = "too_old"  # no idle capacity within its deadline
    SPEND = "spend"
    UNABLE = "unable"  # the other backend lacks a feature
    REDACTION_FAILED = "redaction_failed"
    REFUSED = "refused"  # the other backend's admission refused the copy
    DEFECT = "defect"


@dataclass(frozen=True, slots=True)
class Copy:
    """The input of the second call and the comparison; it holds no slot, lease or connection of the request.

    Args:
        backend: the backend to call.
        adapter: the adapter of the caller's answer.
        made_at: when the copy was made, in seconds on the gateway's monotonic clock.
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
        """The estimated size in memory: texts (at most 4 bytes per character) and token ids."""
        prompt = sum(len(text) for message in self.plan.messages for text in message.texts)
        prompt += sum(len(tool.parameters or "") + len(tool.description or "") for tool in self.plan.tools)
        evidence = sum(len(chunk.text) for chunk in self.request.chunks)
        answer = len(self.answer.output_text) + len(self.answer.reasoning or "")
        answer += sum(len(call.arguments) for call in self.answer.tool_calls)
        return 4 * (prompt + evidence + answer) + 36 * len(self.plan.token_ids)


def chosen(generation_id: str, sample: float) -> bool:
    """Whether the sample includes this generation; the same in every process."""
    return stable_fraction("shadow", generation_id) < sample


class ShadowQueue:
    """Copies in order of arrival; when it is full, a new copy is rejected."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._copies: deque[tuple[Copy, int]] = deque()
        # Bytes of all copies.
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._copies)

    def offer(self, copy: Copy) -> bool:
        """Add a copy; ``False`` if the queue is full."""
        size = copy.size_bytes
        if len(self._copies) >= self._most or self.size_bytes + size > self._most_bytes:
            return False
        self._copies.append((copy, size))
        self.size_bytes += size
        return True

    def take(self) -> Copy | None:
        """Remove and return the oldest copy; ``None`` if the queue is empty."""
        if not self._copies:
            return None
        copy, size = self._copies.popleft()
        self.size_bytes -= size
        return copy
