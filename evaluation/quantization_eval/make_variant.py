"""Make a variant of a model with weights rounded to a few bits, as weight-only quantization rounds them.

Every matrix of the layers gets one scale per output row (symmetric, round to nearest); embeddings and norms
are not changed. The rounded values are written as float32, so that any engine can load them: the variant
shows what the rounding costs in quality, not what it saves in time or memory.

    python -m evaluation.quantization_eval.make_variant models/demo /tmp/demo-int8
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
# The projections of the layers, which GPTQ, AWQ and int8 kernels also quantize.
_MATRIX = re.compile(r"layers\.\d+\..*_proj\.weight$")


def rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Return ``weight`` rounded to ``bits`` bits, with one scale per row; float32."""
    most = 2 ** (bits - 1) - 1
    weight = weight.to(torch.float32)
    scale = weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / most
    made: torch.Tensor = (weight / scale).round().clamp(-most, most) * scale
    return made


def make_variant(base: Path, out: Path, *, bits: int) -> int:
    """Write the variant's folder, and return how many matrices were rounded.

    Raises:
        ValueError: bits outside 2 to 8, a folder without one file of weights, or without such matrices.
        FileExistsError: ``out`` exists.
    """
    if not 2 <= bits <= 8:
        raise ValueError(f"bits is {bits}; allowed: 2 to 8")
    source = base / WEIGHTS
    if not source.is_file():
        raise ValueError(f"{base}: allowed: a folder with {WEIGHTS}")
    weights = load_file(source)
    names = [name for name, weight in weights.items() if _MATRIX.search(name) and weight.ndim == 2]
    if not names:
        raise ValueError(f"{source}: no projections of layers; allowed: a decoder's weights")
    out.mkdir(parents=True)
    for file in base.iterdir():
        if file.is_file() and file.name != WEIGHTS:
            shutil.copy(file, out / file.name)
    wide = {name: weight.to(torch.float32).contiguous() for name, weight in weights.items()}
    wide |= {name: rounded(weights[name], bits).contiguous() for name in names}
    save_file(wide, out / WEIGHTS, metadata={"format": "pt", "quantization": f"weight-only int{bits}"})
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    config |= {"dtype": "float32", "torch_dtype": "float32"}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return len(names)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command line; the exit status."""
    cli = argparse.ArgumentParser(
        prog="evaluation.quantization_eval.make_variant",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_argument("base", type=Path, help="the model's folder")
    cli.add_argument("out", type=Path, help="the folder to make")
    cli.add_argument("--bits", type=int, default=8, help="2 to 8 (default: %(default)s)")
    args = cli.parse_args(argv)
    try:
        count = make_variant(args.base, args.out, bits=args.bits)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{args.out}: {count} matrices of {args.bits} bits")
    return 0


if __name__ == "__main__":
    sys.exit(main())
