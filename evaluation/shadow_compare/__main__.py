"""Compare shadowed pairs of the ledger's database, or write out what `sluice shadow report --json` printed.

Nothing is sent anywhere unless --mlflow is given. Pairs have no prompts, and texts only when
shadow.keep_texts is on; these texts are redacted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accounting.errors import LedgerUnavailable
from accounting.shadow_pairs import ShadowPairStore
from accounting.shadow_values import ShadowPair
from evaluation.shadow_compare.page import page
from evaluation.shadow_compare.tracking import MlflowTracker, TrackingError, log_report
from gateway.shadow.report import make_report
from ops.cli.console import print_json
from ops.cli.shadow import print_report

DONE, NOT_RUN = 0, 2

_EPILOG = """
examples:
  python -m evaluation.shadow_compare --ledger sqlite+aiosqlite:///state/sluice.db
  python -m evaluation.shadow_compare --ledger sqlite+aiosqlite:///state/sluice.db --html shadow.html --json
  sluice shadow report --json | python -m evaluation.shadow_compare --report - --html shadow.html
  python -m evaluation.shadow_compare --ledger postgresql+asyncpg://sluice@db/sluice \\
      --mlflow http://mlflow:5000 --experiment sluice-shadow

exit status: 0 done, 2 could not be read, written or logged
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    cli = argparse.ArgumentParser(
        prog="evaluation.shadow_compare",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_argument(
        "--ledger", default="sqlite+aiosqlite:///state/sluice.db", help="as ledger.url (%(default)s)"
    )
    cli.add_argument(
        "--report", metavar="FILE", help="a report as JSON, in place of --ledger; - is standard input"
    )
    cli.add_argument("--limit", type=int, default=10_000, help="the newest pairs (default: %(default)s)")
    cli.add_argument("--route", default=None, help="of one route alone")
    cli.add_argument("--since", type=float, default=None, help="Unix seconds")
    cli.add_argument("--json", action="store_true", help="print the report as JSON")
    cli.add_argument("--html", type=Path, default=None, help="write a page with plots here too")
    cli.add_argument("--mlflow", metavar="URI", default=None, help="log the report there as a run")
    cli.add_argument("--experiment", default="sluice-shadow", help="MLflow's (default: %(default)s)")
    return cli


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command line; the exit status."""
    args = parser().parse_args(argv)
    try:
        report = (
            _given(args.report)
            if args.report
            else make_report(asyncio.run(_read(args.ledger, args.limit, args.route, args.since)))
        )
        if args.html is not None:
            args.html.write_text(page(report), encoding="utf-8")
        if args.mlflow is not None:
            text = json.dumps(report, ensure_ascii=False, indent=1)
            run = log_report(report, MlflowTracker(args.mlflow, args.experiment), as_text=text)
            print(f"logged as run {run}", file=sys.stderr)
    except (LedgerUnavailable, TrackingError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return NOT_RUN
    if args.json:
        print_json(report)
    else:
        print_report(report)
    return DONE


def _given(file: str) -> dict[str, Any]:
    text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    try:
        report = json.loads(text)
    except json.JSONDecodeError:
        report = None  # an empty pipe: the command before it has failed and said why
    if not isinstance(report, dict) or not {"pairs", "groups", "quantiles"} <= report.keys():
        raise ValueError(f"--report: {file} is not a report of `sluice shadow report --json`")
    return report


async def _read(url: str, limit: int, route: str | None, since: float | None) -> list[ShadowPair]:
    # SQLite would create an empty database for a wrong name.
    if (file := _sqlite_file(url)) is not None and not file.is_file():
        raise LedgerUnavailable(f"--ledger: {file} is not there; allowed: the file of a gateway's ledger.url")
    # A reader deletes nothing, so the retention limits do not matter here.
    store = ShadowPairStore(url, keep_pairs=limit, keep_s=float("inf"))
    try:
        return await store.newest(limit, route=route, since=since)
    finally:
        await store.close()


def _sqlite_file(url: str) -> Path | None:
    scheme, _, place = url.partition(":///")
    return Path(place.partition("?")[0]) if scheme.startswith("sqlite") and place else None


if __name__ == "__main__":
    sys.exit(main())
