"""Compare two backends of a running gateway on language, grounding and safety prompts.

It compares a quantized variant with the model itself, or with another provider: both answer greedily through
the gateway's own API. The exit status is the verdict, for CI; --post stores the signed report in the gateway.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from evaluation.adapter_regression.prompts import PromptSetError, load_prompts
from evaluation.adapter_regression.thresholds import ThresholdsError
from evaluation.quantization_eval.gate import DEFAULT, load_gate
from gateway.contracts.evaluation_report import evaluation_key, sign
from ops.cli.console import check_folder, print_json, screen, write_figures
from ops.client import DEFAULT_URL, AdminClient, AdminError

PROMPTS = Path(__file__).with_name("prompts.jsonl")
PASSED, FAILED, NOT_RUN = 0, 1, 2
# Longest time of one answer, in seconds.
ANSWER_TIMEOUT_S = 300.0

_EPILOG = """
examples:
  sluice evaluate variant --base bf16 --candidate awq
  sluice evaluate variant --base bf16 --candidate awq --post --url http://127.0.0.1:8000
  sluice evaluate variant --base local --candidate bedrock --json > report.json
  sluice evaluate variant --base bf16 --candidate awq --batch --post

The report is signed with SLUICE_EVALUATION_KEY, else with SLUICE_ADMIN_KEY: the gateway must have the same.

exit status: 0 passed, 1 failed, 2 could not be run
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    cli = argparse.ArgumentParser(
        prog="sluice evaluate variant",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_argument("--base", required=True, help="the backend that serves")
    cli.add_argument("--candidate", required=True, help="the backend to judge")
    cli.add_argument(
        "--url", default=os.environ.get("SLUICE_URL", DEFAULT_URL), help="(default: %(default)s)"
    )
    cli.add_argument("--key", default=os.environ.get("SLUICE_ADMIN_KEY"), help="default: SLUICE_ADMIN_KEY")
    cli.add_argument("--post", action="store_true", help="store the report in the gateway")
    cli.add_argument("--parallel", type=int, default=4, help="requests at once (default: %(default)s)")
    cli.add_argument("--batch", action="store_true", help="ask by a batch, on idle capacity; may take long")
    cli.add_argument("--prompts", type=Path, default=PROMPTS, help="JSONL (default: the demo shop's)")
    cli.add_argument("--thresholds", type=Path, default=DEFAULT, help="YAML (default: the demo shop's)")
    cli.add_argument("--max-tokens", type=int, default=96, help="longest answer (default: %(default)s)")
    cli.add_argument("--seed", type=int, default=0, help="of the resampling (default: %(default)s)")
    cli.add_argument("--json", action="store_true", help="print the report as JSON")
    cli.add_argument(
        "--answers", type=Path, default=None, help="also write both answers to every prompt here"
    )
    return cli


def main(argv: Sequence[str] | None = None, connect: Callable[..., AdminClient] = AdminClient) -> int:
    """Entry point of the command line; the exit status."""
    args = parser().parse_args(argv)
    try:
        prompts, gate = load_prompts(args.prompts), load_gate(args.thresholds)
        check_folder("--answers", args.answers)
    except (PromptSetError, ThresholdsError, AdminError) as error:
        print(error, file=sys.stderr)
        return NOT_RUN
    # These imports take seconds; --help and a wrong file need not wait for them.
    from evaluation.quantization_eval.report import as_json, as_table
    from evaluation.quantization_eval.run import EvaluationError, evaluate

    client = connect(args.url, args.key, ANSWER_TIMEOUT_S)
    try:
        done = evaluate(
            client, args.base, args.candidate, prompts, gate,
            max_tokens=args.max_tokens, parallel=args.parallel, seed=args.seed, as_batch=args.batch,
        )  # fmt: skip
        report = sign(as_json(done), evaluation_key(os.environ))
        if args.post:
            client.post("admin", "evaluations", body={"report": report})
    except (EvaluationError, AdminError) as error:
        print(error, file=sys.stderr)
        return NOT_RUN
    rows = {case: {"base": ours, "candidate": theirs} for case, (ours, theirs) in done.answers.items()}
    write_figures(rows, args.answers, as_json=False)
    if args.json:
        print_json(report)
    else:
        console = screen()
        console.print(as_table(done))
        console.print("passed" if done.passed else "failed", f"in {done.seconds:.0f} s")
    return PASSED if done.passed else FAILED


if __name__ == "__main__":
    sys.exit(main())
