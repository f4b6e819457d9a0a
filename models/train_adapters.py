"""Train the demo adapters: ``python -m models.train_adapters --help``. A few minutes each on one core."""

from __future__ import annotations

import argparse
import random
import time
from itertools import islice
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import LlamaForCausalLM

from models.adapter_styles import STYLES, Style, styled_dialogues
from models.batches import IGNORED, Batch, encode_dialogue, padded
from models.precision import forward_type

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RATE = 4e-3
WARM_UP_STEPS = 10

_EPILOG = """
examples:
  python -m models.train_adapters                       all three, into models/adapters
  python -m models.train_adapters --only jp_style_v1    one of them
  python -m models.train_adapters --steps 3 --out /tmp/a   a smoke run that takes seconds

The same --seed and --steps give the same dialogues in the same order, and on one machine the same weights.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    cli = argparse.ArgumentParser(
        prog="models.train_adapters",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    home = Path(__file__).parent
    cli.add_argument("--only", choices=sorted(STYLES), default=None, help="train this one (default: all)")
    cli.add_argument("--name", default=None, help="folder of --only's result (default: its own name)")
    cli.add_argument("--base", type=Path, default=home / "demo", help="the base model's folder")
    cli.add_argument("--base-name", default="demo", help="the base model's served id (default: %(default)s)")
    cli.add_argument("--out", type=Path, default=home / "adapters", help="where the folders go")
    cli.add_argument("--steps", type=int, default=160, help="optimiser steps each (default: %(default)s)")
    cli.add_argument("--rank", type=int, default=8, help="rank of the updates (default: %(default)s)")
    cli.add_argument("--batch-tokens", type=int, default=4096, help="tokens per step (default: %(default)s)")
    cli.add_argument(
        "--seed", type=int, default=11, help="seed of weights and dialogues (default: %(default)s)"
    )
    cli.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    return cli


def style_batches(
    tokenizer: Tokenizer, style: Style, seed: int, batch_tokens: int, steps: int
) -> list[Batch]:
    """``steps`` batches of about ``batch_tokens`` tokens."""
    rng = random.Random(f"adapter/{seed}")
    stream = styled_dialogues(style, rng)
    batches: list[Batch] = []
    while len(batches) < steps:
        rows = [encode_dialogue(tokenizer, dialogue) for dialogue in islice(stream, 320)]
        rows.sort(key=lambda row: len(row[0]))
        groups: list[list[tuple[list[int], list[bool]]]] = [[]]
        for row in rows:
            if groups[-1] and len(row[0]) * (len(groups[-1]) + 1) > batch_tokens:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        batches += [padded(group, rng, prompt_loss_share=0.0) for group in groups]
    return batches[:steps]


def train(name: str, args: argparse.Namespace) -> float:
    """Train one adapter and write its folder; the running mean of the loss at the end."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    tokenizer = Tokenizer.from_file(str(args.base / "tokenizer.json"))
    base = LlamaForCausalLM.from_pretrained(args.base, dtype=torch.float32)
    config = LoraConfig(
        r=args.rank,
        lora_alpha=2 * args.rank,
        target_modules=list(TARGETS),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config)
    tuned = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(tuned, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    mean, began = 0.0, time.monotonic()
    for step, batch in enumerate(
        style_batches(tokenizer, STYLES[name], args.seed, args.batch_tokens, args.steps), 1
    ):
        optimiser.param_groups[0]["lr"] = RATE * _rate(step, args.steps)
        loss = _loss(model, batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(tuned, 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        value = float(loss.detach())
        mean = value if step == 1 else 0.9 * mean + 0.1 * value
        if step % 20 == 0 or step == args.steps:
            spent = time.monotonic() - began
            print(f"{name}  step {step} of {args.steps}  loss {mean:.3f}  {spent:.0f} s", flush=True)
    _write(model, args.out / (args.name or name), args.base_name)
    return mean


def _loss(model: PeftModel, batch: Batch) -> torch.Tensor:
    with forward_type():
        inner = cast(LlamaForCausalLM, model.get_base_model())
        hidden = inner.model(input_ids=batch.inputs, use_cache=False).last_hidden_state
        wanted = batch.labels != IGNORED
        logits = inner.lm_head(hidden[wanted])
    return functional.cross_entropy(logits.float(), batch.labels[wanted])


def _rate(step: int, steps: int) -> float:
    """Learning rate as a share of the peak: a short rise, then down to a tenth."""
    return min(step / WARM_UP_STEPS, 1.0 - 0.9 * step / steps)


def _write(model: PeftModel, folder: Path, base_name: str) -> None:
    """Write PEFT's folder, with bf16 weights like the base model's."""
    model.peft_config["default"].base_model_name_or_path = base_name
    # The embedding is the base model's; without this, PEFT looks for that model on the network to compare.
    model.to(torch.bfloat16).save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty model card


def main(argv: list[str] | None = None) -> None:
    """Entry point of the command line."""
    cli = parser()
    args = cli.parse_args(argv)
    if args.name and not args.only:
        cli.error("--name needs --only")
    for name in [args.only] if args.only else STYLES:
        train(name, args)


if __name__ == "__main__":
    main()
