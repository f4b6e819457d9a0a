"""The records of the canary's streams: its states, and each process's counts of a window."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import orjson
from pydantic import TypeAdapter

from gateway.routing.canary import CHECKS, CanaryState, Counts
from gateway.routing.evidence import EvidenceWindow
from gateway.state.port import Record

STREAM: Final = "canary"
SAMPLES: Final = "canary-samples"


@dataclass(frozen=True, slots=True)
class CanaryLease:
    """A state, and the process that holds the lease until a time (seconds since 1970)."""

    state: CanaryState
    holder: str
    until: float


_LEASE: Final = TypeAdapter(CanaryLease)


def lease_of(record: Record) -> CanaryLease:
    """Decode a record. Raises ValueError when it is not understood."""
    return _LEASE.validate_json(record.data)


def sample_data(canary: str, window: int, counts: Counts) -> bytes:
    counted = {
        check: [one.canary_bad, one.canary, one.baseline_bad, one.baseline] for check, one in counts.items()
    }
    return orjson.dumps({"canary": canary, "window": window, "counts": counted})


def windows_of(records: Iterable[Record], canary: str) -> list[dict[str, EvidenceWindow]]:
    """Return the canary's windows, oldest first, summed over the processes; skip other canaries' records."""
    found: dict[int, dict[str, EvidenceWindow]] = {}
    for record in records:
        data: Any = orjson.loads(record.data)
        if not isinstance(data, dict) or data.get("canary") != canary:
            continue
        window = found.setdefault(int(data["window"]), {})
        for check, numbers in data["counts"].items():
            if check.partition(".")[0] in CHECKS:
                window[check] = window.get(check, EvidenceWindow()) + EvidenceWindow(*map(int, numbers))
    return [found[number] for number in sorted(found)]
