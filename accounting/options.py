"""Settings of the ledger, its writer and its journal."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from accounting.events import LedgerEvent


class Durability(StrEnum):
    """What the end of an answer waits for, and what happens when that fails.

    * ``strict``: its row is on disk; otherwise no answer, and no new work.
    * ``group``: its row is on disk; otherwise the answer is sent and the fault reported.
    * ``relaxed``: nothing; the row is on disk some 20 ms later.
    * ``memory``: nothing, and there is no journal; the row is in the database some 0.1 s later.
    """

    STRICT = "strict"
    GROUP = "group"
    RELAXED = "relaxed"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerOptions:
    """``emit`` must not block; ``clock`` is monotonic seconds, ``unix_time`` Unix seconds.

    Without a ``journal_folder`` there is no journal. ``new_name`` names the journal's files; names sort by
    time.
    """

    emit: Callable[[LedgerEvent], None]
    clock: Callable[[], float]
    unix_time: Callable[[], float]
    # Most rows that wait in memory, and of one transaction.
    outbox_rows: int = 10_000
    batch_rows: int = 500
    # The pause after the first failure; it doubles up to ``writer.LONGEST_RETRY_S``: short enough to catch up
    # quickly after a lock, long enough not to burden a server that is down.
    first_retry_s: float = 0.1
    # How long the first row waits for others to share its transaction. A transaction costs 0.8 ms of CPU, a
    # row of a large one 0.02 ms: alone, a row would cost more than all other stages of its request together.
    gather_s: float = 0.1
    durability: Durability = Durability.GROUP
    journal_folder: Path | None = None
    journal_bytes: int = 1 << 30
    new_name: Callable[[], str] = lambda: "0"
    # Interval of checks for journals of ended processes, and for rows to be read back.
    adopt_s: float = 2.0
    # Interval of checks for days that are over and have no sums.
    sum_s: float = 60.0
    # Longest wait of an answer for the disk. A sync takes 0.2 to 10 ms; one that takes this long is a fault.
    sync_wait_s: float = 1.0
    # Least time between the beginnings of two syncs, and where no answer waits for them. Each wakes the
    # writing thread and then the loop, so a busy gateway shares them; on an idle one an answer does not wait.
    sync_gap_s: float = 0.001
    relaxed_sync_gap_s: float = 0.02
