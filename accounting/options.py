"""Settings of the ledger, its writer and its journal."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from accounting.events import LedgerEvent


class Durability(StrEnum):
    """What the end of an answer waits for, and what happens when that fails.

    * ``strict``: waits until the row is on disk; on failure no answer is sent and no new work starts.
    * ``group``: waits until the row is on disk; on failure the answer is sent and the failure is reported.
    * ``relaxed``: waits for nothing; the row is on disk some 20 ms later.
    * ``memory``: waits for nothing, and there is no journal; the row is in the database some 0.1 s later.
    """

    STRICT = "strict"
    GROUP = "group"
    RELAXED = "relaxed"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerOptions:
    """``emit`` must not block; ``clock`` is monotonic seconds, ``unix_time`` Unix seconds.

    Without a ``journal_folder`` there is no journal. ``new_name`` returns names of journal files, which must
    sort by time.
    """

    emit: Callable[[LedgerEvent], None]
    clock: Callable[[], float]
    unix_time: Callable[[], float]
    # Most rows that wait in memory; most rows of one transaction.
    outbox_rows: int = 10_000
    batch_rows: int = 500
    # The pause after the first failure, which is then doubled up to ``writer.LONGEST_RETRY_S``: short enough
    # to catch up quickly after a lock, long enough not to burden a server that is down.
    first_retry_s: float = 0.1
    # How long the first row waits for others to share its transaction. A transaction costs 0.8 ms of CPU, a
    # row in a large one 0.02 ms: alone, a row would cost more than all other stages of its request together.
    gather_s: float = 0.1
    durability: Durability = Durability.GROUP
    journal_folder: Path | None = None
    journal_bytes: int = 1 << 30
    new_name: Callable[[], str] = lambda: "0"
    adopt_s: float = 2.0  # interval of checks for journals of ended processes, and for rows to be read back
    # Pause after a failed write of the journal, before it tries to begin another file.
    journal_rest_s: float = 1.0
    sum_s: float = 60.0  # interval of checks for days that are over and have no sums
    # Longest wait of an answer for the disk. A sync takes 0.2 to 10 ms; one that takes this long has failed.
    sync_wait_s: float = 1.0
    # Least time between the starts of two syncs, and the same for ``relaxed``, where no answer waits. A sync
    # wakes the thread and then the loop, so a busy gateway shares syncs; an idle gateway syncs at once.
    sync_gap_s: float = 0.001
    relaxed_sync_gap_s: float = 0.02
