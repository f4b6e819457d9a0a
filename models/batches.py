"""Token batches from the dialogue stream: encoded messages, loss masks, batches of similar length."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from models.dialogues import Mix, make_dialogue
from models.tokenizer import MESSAGE_END, MESSAGE_START
from models.tool_dialogues import Message

_CHUNK = 640  # number of dialogues that are sorted by length together
PROMPT_LOSS_SHARE = 0.08  # share of non-answer tokens with loss, so that the model also learns prompts
IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """Right-padded ``inputs`` and next-token ``labels``, rows × columns; ``tokens`` excludes padding."""

    inputs: torch.Tensor
    labels: torch.Tensor
    tokens: int


def encode_dialogue(tokenizer: Tokenizer, dialogue: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """Return the token ids of the rendered dialogue, and for each whether the model should produce it."""
    ids: list[int] = []
    produced: list[bool] = []
    for message in dialogue:
        head = tokenizer.encode(f"{MESSAGE_START}{message['role']}\n").ids
        body = tokenizer.encode(message["content"] + MESSAGE_END).ids
        tail = tokenizer.encode("\n").ids
        ids += head + body + tail
        answer = message["role"] == "assistant"
        produced += [False] * len(head) + [answer] * len(body) + [False] * len(tail)
    return ids, produced


def batches(
    tokenizer: Tokenizer,
    seed: int,
    batch_tokens: int,
    max_tokens: int,
    skip: int = 0,
    mix: Mix | None = None,
) -> Iterator[Batch]:
    """Endless batches of about ``batch_tokens`` padded tokens, without the first ``skip`` (for resuming)."""
    number = 0
    chunk = 0
    while True:
        rng = random.Random(f"{seed}/{chunk}")
        chunk += 1
        encoded = [encode_dialogue(tokenizer, make_dialogue(rng, mix)) for _ in range(_CHUNK)]
        rows = sorted((row for row in encoded if len(row[0]) <= max_tokens), key=lambda row: len(row[0]))
        groups: list[list[tuple[list[int], list[bool]]]] = [[]]
        for row in rows:
            if groups[-1] and len(row[0]) * (len(groups[-1]) + 1) > batch_tokens:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        for group in groups:
            if number >= skip:
                yield padded(group, rng)
            number += 1


def padded(
    rows: Sequence[tuple[list[int], list[bool]]],
    rng: random.Random,
    prompt_loss_share: float = PROMPT_LOSS_SHARE,
) -> Batch:
    """Stack rows of different lengths; right padding needs no mask, since a causal model only looks left."""
    width = max(len(ids) for ids, _ in rows) - 1
    inputs = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), IGNORED, dtype=torch.long)
    for row, (ids, produced) in enumerate(rows):
        inputs[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        wanted = [
            token if answer or rng.random() < prompt_loss_share else IGNORED
            for token, answer in zip(ids[1:], produced[1:], strict=True)
        ]
        labels[row, : len(wanted)] = torch.tensor(wanted)
    return Batch(inputs, labels, sum(len(ids) for ids, _ in rows))
