"""The figures of the ledger: how far behind the database is, and how the journal is doing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from accounting.events import JournalFailed, JournalRefusal, JournalRefused, JournalSynced, RowsReplayed

# A sync takes 0.2 ms on a fast disk, 10 ms on a network's; an answer waits for 1 s at most.
SYNC_BUCKETS: Final = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)


class LedgerMetrics:
    """``sluice_ledger_*`` beside the counts of rows."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lag = Gauge(
            "sluice_ledger_lag_seconds",
            "For how long the oldest usage row has been on its way to the database.",
            registry=registry,
        )
        self._bytes = Gauge(
            "sluice_ledger_journal_bytes", "Bytes of this process' journal files.", registry=registry
        )
        self._working = Gauge(
            "sluice_ledger_journal_up", "1 while usage rows are journaled, or no journal is wanted.",
            registry=registry,
        )  # fmt: skip
        self._sync = Histogram(
            "sluice_ledger_journal_sync_seconds",
            "Writing and syncing one group of usage rows.",
            buckets=SYNC_BUCKETS,
            registry=registry,
        )
        self._journaled = Counter(
            "sluice_ledger_journal_rows", "Usage rows that were journaled.", registry=registry
        )
        self._failed = Counter(
            "sluice_ledger_journal_failures", "Groups of usage rows that the disk failed.", registry=registry
        )
        refused = Counter(
            "sluice_ledger_journal_refused",
            "Usage rows that were not journaled: in memory alone.",
            ["reason"],
            registry=registry,
        )
        self._refused = {reason: refused.labels(reason.value) for reason in JournalRefusal}
        self._lost = Counter(
            "sluice_ledger_rows_lost", "Usage rows that will never be written.", registry=registry
        )
        replayed = Counter(
            "sluice_ledger_rows_replayed",
            "Usage rows read back from journals, those that were written before included.",
            ["whose"],
            registry=registry,
        )
        self._replayed = {
            adopted: replayed.labels("adopted" if adopted else "own") for adopted in (True, False)
        }
        self._damaged = Counter(
            "sluice_ledger_journal_damaged_bytes",
            "Bytes of journals that could not be read; the files are set aside.",
            registry=registry,
        )

    def read(self, lag_s: Callable[[], float], size: Callable[[], int], working: Callable[[], bool]) -> None:
        """Where the gauges look when scraped; must neither block nor raise."""
        self._lag.set_function(lag_s)
        self._bytes.set_function(size)
        self._working.set_function(working)

    def synced(self, event: JournalSynced) -> None:
        """A group is on the disk."""
        self._sync.observe(event.took_s)
        self._journaled.inc(event.rows)

    def failed(self, event: JournalFailed) -> None:
        """The disk failed a group."""
        self._failed.inc()

    def refused(self, event: JournalRefused) -> None:
        """A row is in memory alone."""
        self._refused[event.reason].inc()

    def replayed(self, event: RowsReplayed) -> None:
        """A file was read back."""
        self._replayed[event.adopted].inc(event.count)
        self._damaged.inc(event.damaged_bytes)

    def lost(self, rows: int) -> None:
        """Rows are gone."""
        self._lost.inc(rows)
