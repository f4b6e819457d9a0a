"""Train the demo model from scratch on generated shop dialogues: ``python -m models.train_demo --help``."""

from __future__ import annotations

import argparse
import itertools
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import LlamaForCausalLM

from models.batches import IGNORED, Batch, batches
from models.demo_folder import new_model, replace_file, write_folder, write_weights
from models.dialogues import MIXES, dialogues
from models.precision import forward_type, muon
from models.tokenizer import train_tokenizer

MATRIX_RATE = 4e-3
EMBEDDING_RATE = 3e-3
WARM_UP = 0.03  # share of the run with a rising learning rate
FLOOR = 0.02  # last learning rate as a share of the peak
TOKENIZER_DIALOGUES = 15_000

_EPILOG = """
examples:
  python -m models.train_demo --minutes 40            train for 40 minutes into models/demo
  python -m models.train_demo --steps 20 --out /tmp/d a smoke run that takes seconds
  python -m models.train_demo --minutes 40 --resume   go on from the last checkpoint

The learning rate warms up and then falls along a cosine to the end of the run, which is whichever of
--steps and --minutes comes first. One batch holds about --batch-tokens tokens. The same --seed and --steps
give the same dialogues in the same order. The folder gets a usable model.safetensors at every --save-every.
"""


@dataclass
class Progress:
    """The progress of a run, as stored in checkpoints."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = float("nan")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    cli = argparse.ArgumentParser(
        prog="models.train_demo",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_argument("--steps", type=int, default=3000, help="optimiser steps at most (default: %(default)s)")
    cli.add_argument("--minutes", type=float, default=None, help="wall time at most (default: no limit)")
    cli.add_argument("--out", type=Path, default=Path(__file__).with_name("demo"), help="folder of the model")
    cli.add_argument(
        "--seed", type=int, default=7, help="seed of weights and dialogues (default: %(default)s)"
    )
    cli.add_argument("--batch-tokens", type=int, default=4096, help="tokens per step (default: %(default)s)")
    cli.add_argument(
        "--max-tokens", type=int, default=2048, help="longest dialogue kept (default: %(default)s)"
    )
    cli.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    cli.add_argument("--save-every", type=int, default=200, help="steps between saves (default: %(default)s)")
    cli.add_argument("--checkpoint", type=Path, default=None, help="checkpoint file to write at every save")
    cli.add_argument("--resume", action="store_true", help="go on from --checkpoint")
    cli.add_argument(
        "--init",
        type=Path,
        default=None,
        help="checkpoint or model folder whose weights a run starts from",
    )
    cli.add_argument(
        "--mix", choices=sorted(MIXES), default="general", help="kinds of dialogues (default: %(default)s)"
    )
    cli.add_argument(
        "--peak", type=float, default=1.0, help="scale of the learning rates (default: %(default)s)"
    )
    cli.add_argument("--keep-tokenizer", action="store_true", help="use the tokenizer already in --out")
    return cli


def optimisers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the weight matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        muon(matrices, MATRIX_RATE, weight_decay=0.01),
        torch.optim.AdamW(others, lr=EMBEDDING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def rate_factor(done: float) -> float:
    """Learning rate as a share of the peak, after ``done`` (0 to 1) of the run."""
    if done < WARM_UP:
        return max(done / WARM_UP, 0.01)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, (done - WARM_UP) / (1 - WARM_UP))))
    return FLOOR + (1 - FLOOR) * cosine


def batch_loss(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Mean next-token loss; only labelled positions are projected to the vocabulary, which saves a third."""
    with forward_type():
        hidden = model.model(input_ids=batch.inputs, use_cache=False).last_hidden_state
        wanted = batch.labels != IGNORED
        logits = model.lm_head(hidden[wanted])
    return functional.cross_entropy(logits.float(), batch.labels[wanted])


def train_step(
    model: LlamaForCausalLM, tuning: list[torch.optim.Optimizer], batch: Batch, factor: float
) -> float:
    """One optimiser step; returns the loss."""
    for optimiser, rate in zip(tuning, (MATRIX_RATE, EMBEDDING_RATE), strict=True):
        for group in optimiser.param_groups:
            group["lr"] = rate * factor
    loss = batch_loss(model, batch)
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimiser in tuning:
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    return float(loss.detach())


def load_or_train_tokenizer(args: argparse.Namespace) -> Tokenizer:
    """The folder's tokenizer when building on earlier weights or asked to keep it, else a new one."""
    if args.resume or args.init or args.keep_tokenizer:
        return Tokenizer.from_file(str(args.out / "tokenizer.json"))
    sample = itertools.islice(dialogues(args.seed), TOKENIZER_DIALOGUES)
    return train_tokenizer(message["content"] for dialogue in sample for message in dialogue)


def earlier_weights(path: Path) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint or of a model folder."""
    if not path.is_dir():
        state: dict[str, torch.Tensor] = torch.load(path, weights_only=True)["model"]
        return state
    weights = load_file(path / "model.safetensors")
    return {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}


def train(args: argparse.Namespace) -> Progress:
    """Run the training that the command line describes."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    tokenizer = load_or_train_tokenizer(args)
    model = new_model(tokenizer)
    tuning = optimisers(model)
    progress = Progress()
    if args.resume:
        state = torch.load(args.checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for optimiser, saved in zip(tuning, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        progress = Progress(**state["progress"])
    elif args.init:
        model.load_state_dict(earlier_weights(args.init))
    if not args.resume:
        write_folder(args.out, tokenizer)
        write_weights(args.out, model)
    print(f"parameters {sum(p.numel() for p in model.parameters()):,}", flush=True)
    began = time.monotonic() - progress.seconds
    stream = batches(
        tokenizer, args.seed, args.batch_tokens, args.max_tokens, skip=progress.step, mix=MIXES[args.mix]
    )
    while progress.step < args.steps:
        done = progress.step / args.steps
        if args.minutes:
            done = max(done, progress.seconds / 60 / args.minutes)
        if done >= 1:
            break
        batch = next(stream)
        loss = train_step(model, tuning, batch, args.peak * rate_factor(done))
        progress.step += 1
        progress.tokens += batch.tokens
        progress.seconds = time.monotonic() - began
        progress.loss = loss if progress.step == 1 else 0.97 * progress.loss + 0.03 * loss
        if progress.step % 20 == 0:
            left = progress.seconds * (1 - done) / max(done, 1e-6) / 60
            print(
                f"step {progress.step}  loss {progress.loss:.3f}  tokens {progress.tokens / 1e6:.2f}M  "
                f"{progress.tokens / progress.seconds:.0f} tokens/s  done {done:.0%}  left {left:.0f} min",
                flush=True,
            )
        if progress.step % args.save_every == 0:
            save(args, model, tuning, progress)
    save(args, model, tuning, progress)
    return progress


def save(
    args: argparse.Namespace, model: LlamaForCausalLM, tuning: list[torch.optim.Optimizer], progress: Progress
) -> None:
    """Write the weights into the folder, and a checkpoint where one is asked for."""
    write_weights(args.out, model)
    if args.checkpoint:
        state = {
            "model": model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in tuning],
            "progress": vars(progress),
        }
        replace_file(args.checkpoint, lambda path: torch.save(state, path))


def main(argv: list[str] | None = None) -> None:
    """Entry point of the command line."""
    cli = parser()
    args = cli.parse_args(argv)
    if args.resume and not args.checkpoint:
        cli.error("--resume needs --checkpoint")
    progress = train(args)
    print(
        f"finished: {progress.step} steps, {progress.tokens:,} tokens, {progress.seconds / 60:.1f} minutes, "
        f"loss {progress.loss:.3f}"
    )


if __name__ == "__main__":
    main()
