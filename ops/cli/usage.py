"""`sluice usage`: reports of usage and cost, export of the rows, comparison with the engines' counters."""

import csv
import json
from collections.abc import Iterator, Mapping
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from accounting.values import UsageRow
from ops.cli.console import opened, print_rows, print_text, started
from ops.cli.operator import Operator, command_group, given, operator_command

AT = ("admin", "usage")
NANOUSD = 1_000_000_000
# Rows of one request of an export. The gateway builds a page on its event loop: 1,000 rows take 5 ms, and the
# 10,000 that it allows 60 ms, for which all its streams would stand still.
PAGE_ROWS = 1_000

usage = command_group("usage", "Usage and cost: sums, rows, comparison with the engines' counters.")

Since = Annotated[
    str | None,
    typer.Option(
        help="From this time on: 2026-11-22 (UTC), an ISO 8601 time with an offset, or Unix seconds."
    ),
]
Until = Annotated[str | None, typer.Option(help="Before this time; same format as --since.")]


class ExportFormat(StrEnum):
    """The file format of an export."""

    CSV = "csv"
    JSONL = "jsonl"


@operator_command(usage, "report")
def report(
    gateway: Operator,
    by: Annotated[
        str,
        typer.Option(
            help="Comma-separated: tenant, org, user, key, route, model, adapter, backend, day, hour."
        ),
    ] = "tenant",
    since: Since = None,
    until: Until = None,
    kind: Annotated[
        str,
        typer.Option(help="request, shadow, cache, or front (requests of another Sluice, which bills them)."),
    ] = "request",
) -> None:
    """Sum up tokens and cost. Margin: billed tokens that a cache served, minus computed tokens not billed.

    Example: sluice usage report --by tenant,day --since 2026-11-01
    """
    found = gateway.get(*AT, query=given(by=by, kind=kind, since=since, until=until))

    def print_sums(_: object) -> None:
        keys = [one.strip() for one in by.split(",") if one.strip()]
        figures = (
            "requests", "input_tokens", "output_tokens", "cached_tokens", "billed_tokens",
            "computed_tokens", "margin_tokens",
        )  # fmt: skip
        right = (*(name.removesuffix("_tokens") for name in figures), "cost (USD)")
        rows = (
            (
                *("-" if row[name] is None else row[name] for name in keys),
                *(f"{row[name]:,}" for name in figures),
                _cost(row),
            )
            for row in found["rows"]
        )
        print_rows((*keys, *right), rows, right=right)
        if unpriced := sum(row["unpriced_tokens"] for row in found["rows"]):
            print(f"no price for {unpriced:,} tokens; set ledger.prices or backends.NAME.price")

    gateway.show(found, print_sums)


@operator_command(usage, "export")
def export(
    gateway: Operator,
    to: Annotated[Path | None, typer.Option("--to", "-o", help="The file; default: standard output.")] = None,
    written_as: Annotated[ExportFormat, typer.Option("--format", help="csv or jsonl.")] = ExportFormat.CSV,
    since: Since = None,
    until: Until = None,
) -> None:
    """Write all rows, of all kinds, oldest first; --json means --format jsonl.

    Example: sluice usage export --since 2026-11-01 --until 2026-12-01 -o november.csv
    """
    rows = started(_rows(gateway, given(since=since, until=until)))
    with opened(to) as out:
        if gateway.as_json or written_as is ExportFormat.JSONL:
            for row in rows:
                print_text(json.dumps(row, ensure_ascii=False), file=out)
        else:
            _write_csv(rows, out)


@operator_command(usage, "reconcile")
def reconcile(gateway: Operator, since: Since = None, until: Until = None) -> None:
    """Compare the ledger with the engines' own counters, by backend and hour.

    Exit code 1 if the ledger has more tokens than the engine counted in an hour that was observed whole.

    Example: sluice usage reconcile --since 2026-11-22
    """
    found = gateway.get(*AT, "reconcile", query=given(since=since, until=until))

    def print_hours(_: object) -> None:
        if not found["rows"]:
            print("nothing to compare yet: an hour is compared once an engine has reported its counters")
            return
        not_billed = tuple(found["rows"][0]["not_billed"])
        right = (
            "observed", "requests", "engine in/out", "ledger in/out", "difference in/out",
            *not_billed,
        )  # fmt: skip
        rows = (
            (
                row["hour"],
                row["backend"],
                f"{row['covered']:.0%}",
                f"{row['requests']:,}",
                *(
                    f"{row[of]['prompt_tokens']:,} / {row[of]['generation_tokens']:,}"
                    for of in ("engine", "ledger", "difference")
                ),
                *(f"{row['not_billed'][name]:,}" for name in not_billed),
                row["verdict"],
            )
            for row in found["rows"]
        )
        print_rows(("hour", "backend", *right, "verdict"), rows, right=right)

    gateway.show(found, print_hours)
    watched = (row for row in found["rows"] if row["covered"] >= 0.999)
    if any(min(row["difference"].values()) < 0 for row in watched):
        raise typer.Exit(1)


def _cost(row: Mapping[str, Any]) -> str:
    """US dollars; ``no price`` if the row has tokens and none of them has a price."""
    if 0 < row["input_tokens"] + row["output_tokens"] <= row["unpriced_tokens"]:
        return "no price"
    return f"{row['cost_nanousd'] / NANOUSD:,.6f}"


def _rows(gateway: Operator, span: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    after: dict[str, str] = {}
    while True:
        page = gateway.get(*AT, "rows", query={"limit": PAGE_ROWS, **span, **after})
        yield from page["rows"]
        if page["next"] is None:
            return
        after = {"after": page["next"]}


def _write_csv(rows: Iterator[dict[str, Any]], out: TextIO) -> None:
    first = next(rows, None)
    names = (*UsageRow.__struct_fields__, "hour") if first is None else first
    writer = csv.DictWriter(out, fieldnames=list(names))
    writer.writeheader()
    for row in () if first is None else chain((first,), rows):
        writer.writerow({name: _cell(value) for name, value in row.items()})


def _cell(value: object) -> object:
    """The value; text that a spreadsheet would treat as a formula gets an apostrophe in front."""
    formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if formula else value
