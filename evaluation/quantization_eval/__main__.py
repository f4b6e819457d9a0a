"""Compare a quantized variant of a model with the model itself on language, grounding and safety prompts.

Answers are greedy, by the embedded engine, in this process; the loss on the references by transformers. The
verdict is the exit status, for CI.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from evaluation.adapter_regression.prompts import PromptSetError, load_prompts
from evaluation.adapter_regression.thresholds import ThresholdsError
from evaluation.quantization_eval.gate import DEFAULT, load_gate

PROMPTS = Path(__file__).with_name("prompts.jsonl")
PASSED, FAILED, NOT_RUN = 0, 1, 2

_EPILOG = """
examples:
  python -m evaluation.quantization_eval.make_variant models/demo /tmp/demo-int8
  python -m evaluation.quantization_eval --base models/demo --candidate /tmp/demo-int8
  python -m evaluation.quantization_eval --base models/demo --candidate /tmp/demo-int8 --json > report.json

exit status: 0 passed, 1 failed, 2 could not be run
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    cli = argparse.ArgumentParser(
        prog="evaluation.quantization_eval",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_argument("--base", type=Path, required=True, help="the model's folder")
    cli.add_argument("--candidate", type=Path, required=True, help="the variant's folder")
    cli.add_argument("--prompts", type=Path, default=PROMPTS, help="JSONL (default: the demo shop's)")
    cli.add_argument("--thresholds", type=Path, default=DEFAULT, help="YAML (default: thresholds.yaml here)")
    cli.add_argument("--max-tokens", type=int, default=96, help="longest answer (default: %(default)s)")
    cli.add_argument("--seed", type=int, default=0, help="of the resampling (default: %(default)s)")
    cli.add_argument("--json", action="store_true", help="print the report as JSON")
    cli.add_argument(
        "--answers", type=Path, default=None, help="also write both answers to every prompt here"
    )
    return cli


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command line; the exit status."""
    args = parser().parse_args(argv)
    try:
        prompts, gate = load_prompts(args.prompts), load_gate(args.thresholds)
    except (PromptSetError, ThresholdsError) as error:
        print(error, file=sys.stderr)
        return NOT_RUN
    # Seconds of imports that --help and a wrong file need not wait for.
    from evaluation.quantization_eval.report import as_json, as_table
    from evaluation.quantization_eval.run import EvaluationError, evaluate

    try:
        done = evaluate(args.base, args.candidate, prompts, gate, max_tokens=args.max_tokens, seed=args.seed)
    except EvaluationError as error:
        print(error, file=sys.stderr)
        return NOT_RUN
    if args.answers is not None:
        rows = {case: {"base": ours, "candidate": theirs} for case, (ours, theirs) in done.answers.items()}
        args.answers.write_text(json.dumps(rows, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps(as_json(done), indent=2))
    else:
        console = Console(width=None if sys.stdout.isatty() else 130)
        console.print(as_table(done))
        console.print("passed" if done.passed else "failed", f"in {done.seconds:.0f} s")
    return PASSED if done.passed else FAILED


if __name__ == "__main__":
    sys.exit(main())
