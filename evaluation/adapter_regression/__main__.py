"""Compare a new version of a LoRA adapter with the served one.

The embedded engine gives greedy answers in this process; transformers and PEFT compute the loss on the
references. Both adapters are timed in the same run. Nothing is sent anywhere unless --post is given.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from adapters.errors import AdapterRejected
from adapters.verify import list_files, manifest_sha256
from evaluation.adapter_regression.prompts import PromptSetError, load_prompts
from evaluation.adapter_regression.thresholds import DEFAULT, ThresholdsError, load_thresholds
from gateway.config.engine import installed_model
from gateway.contracts.evaluation_report import evaluation_key, sign
from ops.cli.console import check_folder, print_json, screen, write_figures
from ops.client import AdminClient, AdminError

PROMPTS = Path(__file__).with_name("manga_domain.jsonl")
PASSED, FAILED, NOT_RUN = 0, 1, 2

_EPILOG = """
examples:
  sluice evaluate adapter new/manga_domain_v4 --against models/adapters/manga_domain_v3
  sluice evaluate adapter new/manga_domain_v4 --against base --json > report.json
  sluice evaluate adapter new/manga_domain_v4 --against models/adapters/manga_domain_v3 \\
      --post http://127.0.0.1:8000    keep the report with the version of that name in the registry

The report is signed with SLUICE_EVALUATION_KEY, else with SLUICE_ADMIN_KEY: the gateway must have the same.

exit status: 0 passed, 1 failed, 2 could not be run or not be posted; what --post needs is checked first
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    cli = argparse.ArgumentParser(
        prog="sluice evaluate adapter",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_argument("candidate", type=Path, help="folder of the new version, as PEFT saves it")
    cli.add_argument("--against", required=True, help="folder of the served version, or: base")
    cli.add_argument(
        "--prompts", type=Path, default=PROMPTS, help="JSONL of prompts (default: the demo shop's)"
    )
    cli.add_argument("--thresholds", type=Path, default=DEFAULT, help="YAML (default: the demo shop's)")
    cli.add_argument(
        "--model", type=Path, default=Path("models/demo"), help="base model (default: %(default)s)"
    )
    cli.add_argument("--model-id", default="demo", help="the id it is served under (default: %(default)s)")
    cli.add_argument(
        "--max-lora-rank", type=int, default=64, help="as engine.max_lora_rank (default: %(default)s)"
    )
    cli.add_argument("--max-tokens", type=int, default=128, help="longest answer (default: %(default)s)")
    cli.add_argument("--timed", type=int, default=20, help="prompts that are timed (default: %(default)s)")
    cli.add_argument("--rounds", type=int, default=3, help="times each of them (default: %(default)s)")
    cli.add_argument("--seed", type=int, default=0, help="of the resampling (default: %(default)s)")
    cli.add_argument("--json", action="store_true", help="print the report as JSON")
    cli.add_argument(
        "--answers", type=Path, default=None, help="also write both answers to every prompt here"
    )
    cli.add_argument("--post", metavar="URL", default=None, help="a gateway; its key is SLUICE_ADMIN_KEY")
    cli.add_argument("--id", default=None, help="the version in its registry (default: the folder's name)")
    return cli


def main(argv: list[str] | None = None) -> int:
    """Entry point of the command line; the exit status."""
    args = parser().parse_args(argv)
    client = None if args.post is None else AdminClient(args.post, os.environ.get("SLUICE_ADMIN_KEY"))
    adapter_id = args.id or args.candidate.resolve().name
    try:
        prompts, thresholds = load_prompts(args.prompts), load_thresholds(args.thresholds)
        # The comparison takes minutes; whatever would lose its result is refused before it.
        check_folder("--answers", args.answers)
        if client is not None:
            check_registered(client, adapter_id, args.candidate)
    except (PromptSetError, ThresholdsError, AdminError) as error:
        print(error, file=sys.stderr)
        return NOT_RUN
    # These imports take seconds; --help and a wrong file need not wait for them.
    from evaluation.adapter_regression.report import as_json, as_table, explained
    from evaluation.adapter_regression.run import BASE, ComparisonError, RegressionPlan, compare

    plan = RegressionPlan(
        candidate=args.candidate,
        active=None if args.against == BASE else Path(args.against),
        model=Path(installed_model(str(args.model))),
        model_id=args.model_id,
        max_lora_rank=args.max_lora_rank,
        max_tokens=args.max_tokens,
        timed=args.timed,
        rounds=args.rounds,
        seed=args.seed,
    )
    try:
        done = compare(plan, prompts, thresholds)
    except ComparisonError as error:
        print(error, file=sys.stderr)
        return NOT_RUN
    report = sign(as_json(done), evaluation_key(os.environ))
    rows = {case: {"active": old, "candidate": new} for case, (old, new) in done.answers.items()}
    write_figures(rows, args.answers, as_json=False)
    if args.json:
        print_json(report)
    else:
        console = screen()
        console.print(as_table(done))
        for line in explained(done):
            console.print(line, markup=False, highlight=False)
        console.print("passed" if done.passed else "failed", f"in {done.seconds:.0f} s")
    if client is not None:
        try:
            post(client, adapter_id, report)
        except AdminError as error:
            print(f"not posted: {error}", file=sys.stderr)
            return NOT_RUN
    return PASSED if done.passed else FAILED


def check_registered(client: AdminClient, adapter_id: str, candidate: Path) -> None:
    """Raise AdminError unless the gateway answers and has the candidate's content under ``adapter_id``."""
    held = client.get("admin", "adapters", adapter_id)
    with suppress(AdapterRejected, OSError):  # the comparison's own checks say what is wrong
        _check_content(adapter_id, held, manifest_sha256(candidate, list_files(candidate)))


def post(client: AdminClient, adapter_id: str, report: dict[str, Any]) -> None:
    """Store a report with the registered version of the same content. Raises AdminError."""
    _check_content(adapter_id, client.get("admin", "adapters", adapter_id), report["candidate_sha256"])
    client.post("admin", "adapters", adapter_id, "evaluation", body={"report": report})


def _check_content(adapter_id: str, held: Mapping[str, Any], sha256: str) -> None:
    if held.get("sha256") != sha256:
        raise AdminError(
            f"{adapter_id!r} is registered with other content ({held.get('sha256')}) than the candidate "
            f"({sha256})"
        )


if __name__ == "__main__":
    sys.exit(main())
