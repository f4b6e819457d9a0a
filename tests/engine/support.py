"""Helpers of the engine's tests: a tiny checkpoint, requests, and running an engine to its end."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from engine.engine import Engine
from engine.values import (
    EngineInfo,
    GenerationRequest,
    SamplingParams,
    SequenceEnd,
    SequenceOutput,
    TokenIdLogprob,
)

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO_MODEL = REPOSITORY / "models" / "demo"
EOS = 1
SAMPLE_TEXT = (
    "The reader asked which volume comes next, and the shop had it in stock.",
    "Shipping takes three days; returns are free within two weeks.",
    "新しい漫画が入荷しました。次の巻は来週です。",
    "おすすめのシリーズを教えてください。ありがとうございます。",
)


def write_tiny_model(folder: Path, *, eos_token_id: int | None = EOS) -> Path:
    """A random Llama of two layers with grouped heads, untied embeddings and Llama 3's rope scaling."""
    tokenizer = make_tokenizer()
    torch.manual_seed(20_240_501)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        # So wide that the two best logits are rarely close, and rounding rarely changes the greedy token.
        initializer_range=0.35,
        bos_token_id=0,
        eos_token_id=eos_token_id,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE of 512 tokens, in which most Japanese characters and all emoji take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLE_TEXT * 3, trainer)
    missing = 512 - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"[filler-{index}]" for index in range(missing)])
    return tokenizer


def random_prompts(
    count: int, vocab_size: int, *, longest: int = 200, seed: int = 7
) -> list[tuple[int, ...]]:
    """Prompts of varied length, without special tokens."""
    rng = random.Random(seed)
    return [tuple(rng.randrange(3, vocab_size) for _ in range(rng.randint(1, longest))) for _ in range(count)]


def greedy(max_tokens: int, **options: object) -> SamplingParams:
    """Greedy sampling parameters."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **options)  # type: ignore[arg-type]


def reference_greedy(
    folder: Path, prompts: Sequence[Sequence[int]], max_tokens: int, **options: object
) -> list[list[int]]:
    """Returns the greedy tokens of transformers for each prompt, in float32, including the end token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return generate_greedy(model, prompts, max_tokens, **options)


# Prompts in one batch of transformers; such a batch takes about as long as one prompt.
BATCH_SIZE = 16


def generate_greedy(
    model: Any, prompts: Sequence[Sequence[int]], max_tokens: int, **options: object
) -> list[list[int]]:
    """Returns the greedy tokens of a transformers model for each prompt, including the end token.

    Prompts of similar length are computed in one batch, padded on the left and masked. An option may read the
    padding, so with options each prompt is computed alone.
    """
    ends = model.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else {*(ends or ())}
    order = sorted(range(len(prompts)), key=lambda at: len(prompts[at]))
    step = 1 if options else BATCH_SIZE
    results: list[list[int]] = [[]] * len(prompts)
    for batch in (order[at : at + step] for at in range(0, len(order), step)):
        longest = len(prompts[batch[-1]])
        filled = [longest - len(prompts[at]) for at in batch]
        out = model.generate(
            input_ids=torch.tensor(
                [[0] * left + [*prompts[at]] for at, left in zip(batch, filled, strict=True)]
            ),
            attention_mask=torch.tensor([[0] * left + [1] * (longest - left) for left in filled]),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
        for at, tokens in zip(batch, out[:, longest:].tolist(), strict=True):
            length = next((n for n, token in enumerate(tokens, 1) if token in ends), len(tokens))
            results[at] = tokens[:length]
    return results


@dataclass
class Answer:
    """All outputs of one request, joined."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    deltas: list[str] = field(default_factory=list)
    logprobs: list[TokenIdLogprob] = field(default_factory=list)
    last: SequenceOutput | None = None

    @property
    def finish_reason(self) -> SequenceEnd | None:
        return None if self.last is None else self.last.finish_reason

    def take(self, output: SequenceOutput) -> None:
        self.text += output.text
        self.deltas.append(output.text)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.last = output


def run_to_end(engine: Engine, requests: Iterable[GenerationRequest]) -> dict[str, Answer]:
    """Adds all requests at once and steps until none is left, checking integrity on the way."""
    answers: dict[str, Answer] = {}
    for request in requests:
        engine.add(request)
        answers[request.request_id] = Answer()
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id].take(output)
        engine.check_integrity()
    assert engine.signals.kv_usage == 0
    return answers


def run_prompts(
    engine: Engine, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams
) -> list[list[int]]:
    """Returns the tokens generated for each prompt; all requests run together."""
    answers = run_to_end(engine, [GenerationRequest(str(n), p, sampling) for n, p in enumerate(prompts)])
    return [answers[str(n)].token_ids for n in range(len(prompts))]


def make_info(**changes: object) -> EngineInfo:
    """An EngineInfo for engines with a fake runner."""
    values: dict[str, object] = {
        "model": "fake",
        "architecture": "LlamaForCausalLM",
        "vocab_size": 512,
        "max_model_len": 256,
        "eos_token_ids": (EOS,),
        "block_size": 16,
        "total_blocks": 64,
        "max_requests": 64,
        "dtype": "float32",
        "device": "cpu",
        "parameters": 1,
        "load_s": 0.0,
        **changes,
    }
    return EngineInfo(**values)  # type: ignore[arg-type]
