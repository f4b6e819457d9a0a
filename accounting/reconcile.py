"""Compares the ledger with the engines' own counters, by backend and whole hours.

An engine counts more than is billed: probes and warm-ups, summaries of older turns, shadow traffic,
undelivered answers, tokens generated again after a failure. A ledger that counts *more* than the engine has
billed tokens twice or estimated them; an operator must look into it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import Select, and_, case, func, select

from accounting.reports import Span
from accounting.tables import engine_counts, generations
from accounting.values import HOUR_S

_rows = generations.c
_counts = engine_counts.c
# If the observed times of an engine add up to more than this share of the time that has passed of the hour,
# several gateways observed it at once, and each has counted all of its tokens.
_OVERLAP: Final = 1.05
# Hours that were observed for less are not compared: the running hour, and the hour of a start.
WATCHED_S: Final = 0.999 * HOUR_S

NOT_BILLED: Final = ("shadow", "front", "cache", "undelivered")
"""Kinds of tokens that are billed to no tenant here: of shadow traffic, for another Sluice, for the response
cache, of undelivered answers."""
BOOKED: Final = ("prompt_tokens", "generation_tokens", "requests", *NOT_BILLED)
"""The sums that the ledger query returns."""

Line = dict[str, object]


def ledger_query(span: Span) -> Select[Any]:
    """The ledger's tokens by hour and backend, with those of shadow traffic and undelivered answers."""
    tokens = _rows.input_tokens + _rows.output_tokens
    undelivered = and_(
        _rows.kind == "request", _rows.billable_input_tokens + _rows.billable_output_tokens == 0
    )
    return (
        select(
            _rows.hour,
            _rows.backend_name.label("backend"),
            func.sum(_rows.input_tokens).label("prompt_tokens"),
            func.sum(_rows.output_tokens).label("generation_tokens"),
            *(
                func.sum(case((_rows.kind == one, tokens), else_=0)).label(one)
                for one in ("shadow", "front", "cache")
            ),
            func.sum(case((undelivered, tokens), else_=0)).label("undelivered"),
            func.count().label("requests"),
        )
        .where(_rows.backend_name.is_not(None), *span.hours(_rows.hour))
        .group_by(_rows.hour, _rows.backend_name)
    )


def engines_query(span: Span) -> Select[Any]:
    """The engines' tokens by hour, backend, engine and observer."""
    return select(engine_counts).where(*span.hours(_counts.hour))


def compared_lines(
    ledger: Sequence[Mapping[str, Any]], engines: Sequence[Mapping[str, Any]], now: float
) -> list[Line]:
    """One line per hour and backend with an engine's count, in that order; ``now`` is in Unix seconds.

    ``difference`` is the engine's count minus the ledger's; ``not_billed`` are the ledger's tokens that
    are not billed to a tenant.
    """
    booked_rows: dict[tuple[int, str], Counter[str]] = defaultdict(Counter)
    for one in ledger:
        # A backend ``pool/model`` is one model of a pool; the pool's engines count for all its models.
        place = int(one["hour"]), str(one["backend"]).partition("/")[0]
        booked_rows[place].update({name: int(one.get(name) or 0) for name in BOOKED})
    lines: list[Line] = []
    for (hour, backend), prompt, generated, covered_s in _engines(engines, now):
        row = booked_rows[hour, backend]
        engine = {"prompt_tokens": prompt, "generation_tokens": generated}
        difference = {name: count - row[name] for name, count in engine.items()}
        lines.append(
            {
                "hour": datetime.fromtimestamp(hour * HOUR_S, UTC).isoformat(timespec="minutes"),
                "backend": backend,
                "covered": round(min(1.0, covered_s / HOUR_S), 4),
                "requests": row["requests"],
                "engine": engine,
                "ledger": {name: row[name] for name in engine},
                "difference": difference,
                "not_billed": {name: row[name] for name in NOT_BILLED},
                "verdict": _verdict(*difference.values(), watched_s=covered_s),
            }
        )
    return lines


def _engines(
    counts: Sequence[Mapping[str, Any]], now: float
) -> Iterator[tuple[tuple[int, str], int, int, float]]:
    """Tokens by hour and backend, each engine counted once."""
    observers: dict[tuple[int, str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for one in counts:
        observers[int(one["hour"]), str(one["backend"]), str(one["engine"])].append(one)
    sums: dict[tuple[int, str], list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for (hour, backend, _), several in observers.items():
        passed_s = min(HOUR_S, now - hour * HOUR_S)
        overlapping = sum(float(one["covered_s"]) for one in several) > passed_s * _OVERLAP
        chosen = [max(several, key=lambda one: float(one["covered_s"]))] if overlapping else several
        into = sums[hour, backend]
        into[0] += sum(int(one["prompt_tokens"]) for one in chosen)
        into[1] += sum(int(one["generation_tokens"]) for one in chosen)
        into[2] = max(into[2], sum(float(one["covered_s"]) for one in chosen))
    for place in sorted(sums):
        prompt, generated, covered_s = sums[place]
        yield place, int(prompt), int(generated), covered_s


def _verdict(prompt: int, generated: int, *, watched_s: float) -> str:
    if prompt == generated == 0:
        return "equal"
    if watched_s < WATCHED_S:
        return "not compared: the hour is not over, or was watched in part"
    if prompt < 0 or generated < 0:
        return "ledger counts more: requests over the hour's end, or a defect"
    return "engine counts more: probes, warm-ups, summaries, tokens generated again, requests over its end"
