"""A canary's standing, and what a process has seen in a window, as the streams have them."""

from __future__ import annotations

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
class Beat:
    """A standing, and which process drives it until when (seconds since 1970)."""

    standing: CanaryState
    holder: str
    until: float


_BEAT: Final = TypeAdapter(Beat)


def beat_data(beat: Beat) -> bytes:
    """A record's content."""
    return orjson.dumps(beat)


def beat_of(record: Record) -> Beat:
    """Raises ValueError when the record is not one of ours."""
    return _BEAT.validate_json(record.data)


def sample_data(canary: str, window: int, counts: Counts) -> bytes:
    """A process' counts of one window."""
    counted = {
        check: [one.canary_bad, one.canary, one.baseline_bad, one.baseline] for check, one in counts.items()
    }
    return orjson.dumps({"canary": canary, "window": window, "counts": counted})


def windows_of(records: Iterable[Record], canary: str) -> list[dict[str, EvidenceWindow]]:
    """The canary's windows, oldest first, all processes' of one window added up; strange records are left."""
    found: dict[int, dict[str, EvidenceWindow]] = {}
    for record in records:
        data: Any = orjson.loads(record.data)
        if not isinstance(data, dict) or data.get("canary") != canary:
            continue
        window = found.setdefault(int(data["window"]), {})
        for check, numbers in data["counts"].items():
            if check in CHECKS:
                window[check] = window.get(check, EvidenceWindow()) + EvidenceWindow(*map(int, numbers))
    return [found[number] for number in sorted(found)]
