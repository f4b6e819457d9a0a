"""The ledger beside the engines' own counters, backend by backend and hour by hour.

An engine counts more than is billed: probes and warm-ups, summaries of older turns, shadow traffic, answers
that nobody got, tokens that were generated again after a failure. A ledger that counts *more* than the engine
has billed something twice or estimated it, and is to be looked at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import Select, and_, case, func, select

from accounting.reports import Span
from accounting.tables import engine_counts, generations
from accounting.values import HOUR_S

_rows = generations.c
_counts = engine_counts.c
# Several gateways may have counted one engine at the same time; then each has counted all of it.
_OVERLAP: Final = 1.05

Line = dict[str, object]


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """Compares whole hours: those in which ``span`` begins and ends are compared whole."""

    span: Span

    def ledger_query(self) -> Select[Any]:
        """What rows say, by hour and backend, apart by what became of them."""
        tokens = _rows.input_tokens + _rows.output_tokens
        shadow = _rows.kind == "shadow"
        undelivered = and_(
            _rows.kind == "request", _rows.billable_input_tokens + _rows.billable_output_tokens == 0
        )
        return (
            select(
                _rows.hour,
                _rows.backend_name.label("backend"),
                func.sum(_rows.input_tokens).label("prompt_tokens"),
                func.sum(_rows.output_tokens).label("generation_tokens"),
                func.sum(case((shadow, tokens), else_=0)).label("shadow"),
                func.sum(case((undelivered, tokens), else_=0)).label("undelivered"),
                func.count().label("requests"),
            )
            .where(_rows.backend_name.is_not(None), *self._hours(_rows.hour))
            .group_by(_rows.hour, _rows.backend_name)
        )

    def engines_query(self) -> Select[Any]:
        """What the engines say, by hour, backend, engine and who asked it."""
        return select(engine_counts).where(*self._hours(_counts.hour))

    def lines(self, ledger: Sequence[Mapping[str, Any]], engines: Sequence[Mapping[str, Any]]) -> list[Line]:
        """One line a backend and hour that an engine told of, by hour and backend.

        ``difference`` is what the engine counted more than the ledger; ``explained`` names what the ledger
        itself knows is billed to nobody, and is already a part of its tokens.
        """
        told = {(int(one["hour"]), str(one["backend"])): one for one in ledger}
        lines: list[Line] = []
        for (hour, backend), prompt, generated, covered_s in _engines(engines):
            row = told.get((hour, backend), {})
            booked = {name: int(row.get(name) or 0) for name in ("prompt_tokens", "generation_tokens")}
            lines.append(
                {
                    "hour": datetime.fromtimestamp(hour * HOUR_S, UTC).isoformat(timespec="minutes"),
                    "backend": backend,
                    "covered": round(min(1.0, covered_s / HOUR_S), 4),
                    "requests": int(row.get("requests") or 0),
                    "engine": {"prompt_tokens": prompt, "generation_tokens": generated},
                    "ledger": booked,
                    "difference": {
                        "prompt_tokens": prompt - booked["prompt_tokens"],
                        "generation_tokens": generated - booked["generation_tokens"],
                    },
                    "not_billed": {name: int(row.get(name) or 0) for name in ("shadow", "undelivered")},
                    "verdict": _verdict(
                        prompt - booked["prompt_tokens"], generated - booked["generation_tokens"]
                    ),
                }
            )
        return lines

    def _hours(self, column: Any) -> list[Any]:
        found: list[Any] = []
        if self.span.since is not None:
            found.append(column >= int(self.span.since // HOUR_S))
        if self.span.until is not None:
            found.append(column <= int(self.span.until // HOUR_S))
        return found


def _engines(counts: Sequence[Mapping[str, Any]]) -> Iterator[tuple[tuple[int, str], int, int, float]]:
    """Tokens of each hour and backend: of all its engines, each counted once."""
    observers: dict[tuple[int, str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for one in counts:
        observers[int(one["hour"]), str(one["backend"]), str(one["engine"])].append(one)
    sums: dict[tuple[int, str], list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for (hour, backend, _), several in observers.items():
        overlapping = sum(float(one["covered_s"]) for one in several) > HOUR_S * _OVERLAP
        kept = [max(several, key=lambda one: float(one["covered_s"]))] if overlapping else several
        into = sums[hour, backend]
        into[0] += sum(int(one["prompt_tokens"]) for one in kept)
        into[1] += sum(int(one["generation_tokens"]) for one in kept)
        into[2] = max(into[2], sum(float(one["covered_s"]) for one in kept))
    for place in sorted(sums):
        prompt, generated, covered_s = sums[place]
        yield place, int(prompt), int(generated), covered_s


def _verdict(prompt: int, generated: int) -> str:
    if prompt == generated == 0:
        return "equal"
    if prompt < 0 or generated < 0:
        return "ledger counts more: an hour that was watched in part, requests over its end, or a defect"
    return "engine counts more: probes, warm-ups, summaries, tokens generated again, requests over its end"
