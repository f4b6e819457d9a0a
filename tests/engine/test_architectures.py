"""Llama, Qwen2 and Qwen3 give the tokens of transformers; an unsupported variant is refused by name."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine.engine import Engine
from engine.errors import EngineStartError, UnsupportedArchitecture
from engine.loader import read_config
from engine.values import GenerationRequest
from tests.engine.adapters import peft_greedy, write_adapter
from tests.engine.support import (
    greedy,
    make_tokenizer,
    random_prompts,
    reference_greedy,
    run_prompts,
    run_to_end,
)

MAX_TOKENS = 12
PROMPTS = tuple(random_prompts(16, 512, longest=100))
SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.35,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
DEFAULT = {"rope_type": "default", "rope_theta": 1_000_000.0}
CHECKPOINTS: dict[str, Callable[[], Any]] = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, rope_parameters=DEFAULT)),
    "qwen2 tied": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SHAPE, rope_parameters=DEFAULT, tie_word_embeddings=True)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16, rope_parameters=DEFAULT)),
    # As in the real Qwen3 models, a head is wider than hidden_size / num_attention_heads.
    "qwen3 wide heads, tied": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SHAPE, head_dim=32, rope_parameters=DEFAULT, tie_word_embeddings=True)
    ),
    "llama linear": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LINEAR)),
}


def write(folder: Path, make: Callable[[], Any]) -> Path:
    torch.manual_seed(11)
    model = make()
    with torch.no_grad():  # norms of one and biases of zero would hide that they are not used
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module", params=CHECKPOINTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("checkpoint"), CHECKPOINTS[request.param])


@cache
def reference(folder: Path) -> list[list[int]]:
    return reference_greedy(folder, PROMPTS, MAX_TOKENS)


@pytest.mark.parametrize("budget", [1024, 30])
def test_a_batch_gives_the_tokens_of_transformers(
    checkpoint: Path, make_engine: Callable[..., Engine], budget: int
) -> None:
    engine = make_engine(checkpoint, max_num_batched_tokens=budget)
    assert run_prompts(engine, PROMPTS, greedy(MAX_TOKENS)) == reference(checkpoint)


def test_an_adapter_gives_the_tokens_of_peft(
    checkpoint: Path, make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    engine, adapter = make_engine(checkpoint), write_adapter(tmp_path, checkpoint, seed=4)
    engine.install_adapter("a", engine.read_adapter(adapter))
    requests = [
        GenerationRequest(str(n), p, greedy(MAX_TOKENS), adapter_id="a") for n, p in enumerate(PROMPTS)
    ]
    answers = run_to_end(engine, requests)
    assert [answers[one.request_id].token_ids for one in requests] == peft_greedy(
        checkpoint, adapter, PROMPTS, MAX_TOKENS
    )


def test_the_parameter_count_is_that_of_the_checkpoint(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    assert read_config(checkpoint).num_parameters == sum(tensor.numel() for tensor in weights.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "'dynamic' is not supported"),
        (
            {"architectures": ["Qwen3MoeForCausalLM"]},
            "Qwen3MoeForCausalLM; this engine runs LlamaForCausalLM",
        ),
    ],
)
def test_a_variant_that_is_not_run_is_refused_by_name(
    tmp_path: Path, make_engine: Callable[..., Engine], change: dict[str, object], message: str
) -> None:
    folder = write(tmp_path, CHECKPOINTS["qwen3"])
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UnsupportedArchitecture, match=message):
        make_engine(folder)


def test_a_checkpoint_of_another_family_lacks_a_tensor_by_name(
    tmp_path: Path, make_engine: Callable[..., Engine]
) -> None:
    folder = write(tmp_path, CHECKPOINTS["qwen3"])
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["Qwen2ForCausalLM"]}))
    with pytest.raises(EngineStartError, match=r"lacks the tensor model\.layers\.0\.self_attn\.q_proj\.bias"):
        make_engine(folder)
