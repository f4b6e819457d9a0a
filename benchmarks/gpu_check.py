"""Checks and measures the embedded engine on a GPU, in at most ten minutes.

    make gpu-check                (a machine with a CUDA device and PyTorch)
    make gpu-check ARGS=--dry     (tiny shapes on any device: does the check work?)

Each part is a process with a time limit of its own. A part whose packages are missing is skipped, and the
table says so; the kernels and the decode steps need PyTorch alone. The exit status is 1 when a part failed.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Seconds for the whole check; each part gets what is left of them, at most its own limit.
TOTAL_S = 600.0
# A part is only started when this many seconds are left.
LEAST_S = 15.0
STREAMS = (1, 32, 128)
TAIL_CHARS = 300


@dataclass(frozen=True, slots=True)
class Part:
    """One process of the check.

    ``needs`` are the packages that it imports; ``in_dry`` is whether the dry check runs it.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    needs: tuple[str, ...] = ()
    in_dry: bool = True


@dataclass(frozen=True, slots=True)
class Result:
    """A part's result: ``status`` is passed, failed or not run; ``detail``: the finding or the reason."""

    name: str
    status: str
    detail: str
    took_s: float


def parts(*, dry: bool) -> tuple[Part, ...]:
    """Return the parts by importance: the last ones are dropped when time runs out."""
    own = ("-m", "benchmarks.gpu_parts", *(["--tiny"] if dry else []))
    tests = ("-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider")
    return (
        Part("kernels: same tokens on CPU and GPU, graphs on and off", (*own, "kernels"), 120),
        Part("decode steps", (*own, "decode", *(str(count) for count in ((1, 3) if dry else STREAMS))), 240),
        Part("greedy tokens of Transformers", (*own, "transformers"), 90, ("transformers", "tokenizers")),
        Part(
            "CUDA tests",
            (
                *tests,
                *(
                    "tests/engine/test_fixed_decode.py",
                    "tests/engine/test_fused.py",
                    "tests/engine/test_lora.py",
                ),
                *("-k", "on_cuda"),
            ),
            120,
            ("pytest", "xdist", "hypothesis", "pytest_asyncio", "tokenizers", "llguidance", "peft"),
        ),
        Part(
            "vLLM: conformance suite",
            (*tests, "tests/conformance", "-k", "vllm"),
            300,
            ("vllm", "pytest", "xdist", "hypothesis"),
            in_dry=False,
        ),
        Part("sluice serve --gpus all", (*own, "serve"), 150, ("fastapi", "structlog", "httpx")),
    )


def run(part: Part, limit_s: float, *, dry: bool, least_s: float = LEAST_S) -> Result:
    """Run one part, or report why it is not run; it needs ``least_s`` of the remaining time."""
    missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
    if missing:
        return Result(part.name, "not run", f"needs {', '.join(missing)}", 0.0)
    if dry and not part.in_dry:
        return Result(part.name, "not run", "left out of the dry form", 0.0)
    if limit_s < least_s:
        return Result(part.name, "not run", "no time left", 0.0)
    searched = (str(ROOT), os.environ.get("PYTHONPATH"))
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *part.command],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, searched))},
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return Result(part.name, "failed", f"not finished within {limit_s:.0f} s", time.monotonic() - began)
    lines = done.stdout.strip().splitlines()
    took_s = time.monotonic() - began
    if done.returncode:
        words = " ".join((done.stderr.strip() or done.stdout.strip())[-TAIL_CHARS:].split())
        return Result(part.name, "failed", words or f"exit status {done.returncode}", took_s)
    return Result(part.name, "passed", lines[-1] if lines else "", took_s)


def table(results: Sequence[Result], device: str) -> str:
    """The results as Markdown."""
    rows = [f"| {one.name} | {one.status} | {one.detail} | {one.took_s:.0f} s |" for one in results]
    head = f"`make gpu-check` on {device}:"
    return "\n".join([head, "", "| part | result | found | took |", "|---|---|---|--:|", *rows])


def describe_device() -> str:
    """Return the device and PyTorch's version, read in a process of its own: this one imports no PyTorch."""
    code = (
        "import torch; found = torch.cuda.is_available(); "
        "print(torch.cuda.get_device_name() if found else 'the CPU', 'PyTorch', torch.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise SystemExit(
            "PyTorch is not installed for this Python; name one: make gpu-check GPU_PYTHON=python3"
        )
    return done.stdout.strip()


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts and print their table; 1 when one failed."""
    parser = argparse.ArgumentParser(prog="gpu-check", description="Check the engine on a GPU.")
    parser.add_argument("--dry", action="store_true", help="tiny shapes, on any device")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    deadline = time.monotonic() + TOTAL_S
    device = describe_device()
    if "CPU" in device and not options.dry:
        raise SystemExit("there is no CUDA device; make gpu-check ARGS=--dry runs the check on the CPU")
    results = []
    for part in parts(dry=options.dry):
        print(f"{part.name}…", file=sys.stderr, flush=True)
        results.append(run(part, min(part.limit_s, deadline - time.monotonic()), dry=options.dry))
    if options.json:
        rows = [
            {"name": one.name, "status": one.status, "detail": one.detail, "took_s": one.took_s}
            for one in results
        ]
        print(json.dumps({"device": device, "dry": options.dry, "parts": rows}))
    else:
        print(table(results, device))
    return int(any(one.status == "failed" for one in results))


if __name__ == "__main__":
    sys.exit(main())
