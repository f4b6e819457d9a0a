"""A backend's load as a decision sees it: the engine's last word, plus what the engine cannot know yet."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from admission.values import Load


@dataclass(frozen=True, slots=True)
class Unseen:
    """What was admitted here and is not in the engine's last report."""

    sequences: int = 0
    blocks: int = 0


@dataclass(frozen=True, slots=True)
class Standing:
    """A backend's load at the moment of a decision.

    Args:
        queue_depth: sequences that wait for the backend, or will.
        ahead: those of them that need another one to end before they start; the others only wait for
            their prefill.
        capacity: sequences the engine can run side by side now; 0 when unknown.
        kv_usage: share of KV blocks in use, unseen prompts included; may exceed 1.
    """

    queue_depth: int
    ahead: int
    capacity: int
    kv_usage: float


class Reservations:
    """One backend's slots in flight, and how many of them the engine has not reported yet.

    A report is the engine's state at some moment before now; what was admitted since is in neither its
    queue nor its blocks. Without counting that, a burst between two reports passes whole.
    """

    __slots__ = ("_blocks", "_last_ticket", "_report", "_since_report")

    def __init__(self) -> None:
        # ticket -> KV blocks of the prompt; insertion order is admission order
        self._blocks: dict[int, int] = {}
        self._last_ticket = 0
        self._report: Load | None = None
        # tickets in flight that were given since the report last changed
        self._since_report: set[int] = set()

    def __len__(self) -> int:
        """Slots in flight."""
        return len(self._blocks)

    def reserve(self, load: Load | None, blocks: int) -> int:
        """Count a sequence in, decided on ``load``; the ticket gives it back."""
        if load != self._report:
            self._report = load
            self._since_report.clear()
        self._last_ticket += 1
        self._blocks[self._last_ticket] = blocks
        self._since_report.add(self._last_ticket)
        return self._last_ticket

    def release(self, ticket: int) -> None:
        """Count a sequence out. Raises KeyError for a ticket that is not in flight: a leak of ours."""
        del self._blocks[ticket]
        self._since_report.discard(ticket)

    def unseen(self, load: Load) -> Unseen:
        """What ``load`` cannot contain.

        Two signs, the larger counts, both mean the newest slots: given since the report last changed (an
        unchanged report counts as the same one, which errs on the safe side), or more slots in flight
        than the engine knows sequences (a report can change just before an admitted request arrives).
        """
        since = len(self._since_report) if load == self._report else 0
        count = max(since, len(self._blocks) - load.running - load.waiting, 0)
        if count == 0:
            return Unseen()
        return Unseen(count, sum(islice(reversed(self._blocks.values()), count)))


def prompt_blocks(input_tokens: int, load: Load | None) -> int:
    """KV blocks that a prompt and its first token take; 0 when the block size is unknown."""
    if load is None or load.block_size <= 0:
        return 0
    return -(-(input_tokens + 1) // load.block_size)


def standing(load: Load | None, *, in_flight: int, unseen: Unseen, blocks: int) -> Standing:
    """The load that a new sequence meets, whose prompt takes ``blocks`` KV blocks.

    * No load known: the own slots in flight are all there is to count.
    * Batch size unknown: all that the engine does not run may have to wait, and for how long cannot be told.
    * Else the engine takes more while both its batch and its KV pool have room for prompts like this one;
      what exceeds that room waits for others to end.
    """
    if load is None:
        return Standing(in_flight, in_flight, 0, 0.0)

    pending = load.waiting + unseen.sequences
    kv_usage = load.kv_usage
    if load.total_blocks > 0:
        kv_usage += unseen.blocks / load.total_blocks

    if load.max_running <= 0:
        return Standing(pending, pending, 0, kv_usage)

    room = max(0, load.max_running - load.running)
    if load.total_blocks > 0 and blocks > 0:
        free = int(load.total_blocks * max(0.0, 1.0 - load.kv_usage))
        room = min(room, free // blocks)
    ahead = max(0, pending - room)
    return Standing(max(load.waiting, ahead), ahead, max(1, load.running + room), kv_usage)
