"""Damage an adapter on purpose: ``python -m evaluation.adapter_regression.damage SOURCE TARGET``.

Adds noise to every B matrix, as a share of that matrix's own standard deviation. Configuration and shapes
stay valid, so only an evaluation can detect the damage.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from adapters.peft_config import CONFIG_FILE
from adapters.verify import WEIGHTS_FILE


def damage(source: Path, target: Path, *, noise: float, seed: int = 0) -> None:
    """Write a damaged copy. With ``noise`` 1 the noise is as strong as the trained weights."""
    generator = torch.Generator().manual_seed(seed)
    target.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source / CONFIG_FILE, target / CONFIG_FILE)
    tensors = load_file(source / WEIGHTS_FILE)
    for name, tensor in sorted(tensors.items()):
        if ".lora_B." in name:
            strength = float(tensor.float().std()) * noise
            added = torch.randn(tensor.shape, generator=generator) * strength
            tensors[name] = (tensor.float() + added).to(tensor.dtype)
    save_file(tensors, target / WEIGHTS_FILE, metadata={"format": "pt"})


def main(argv: list[str] | None = None) -> None:
    """Entry point of the command line."""
    cli = argparse.ArgumentParser(
        prog="evaluation.adapter_regression.damage",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_argument("source", type=Path, help="an adapter's folder")
    cli.add_argument("target", type=Path, help="where the damaged copy goes")
    cli.add_argument("--noise", type=float, default=1.0, help="strength (default: %(default)s)")
    cli.add_argument("--seed", type=int, default=0, help="seed of the noise (default: %(default)s)")
    args = cli.parse_args(argv)
    damage(args.source, args.target, noise=args.noise, seed=args.seed)


if __name__ == "__main__":
    main()
