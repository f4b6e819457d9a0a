"""Writing the demo model's folder: config, tokenizer and bf16 weights, each file replaced atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from models.tokenizer import END_OF_TEXT, MESSAGE_END, VOCAB_SIZE, save_tokenizer

ROPE_THETA = 10000.0
# 64-wide heads suit GPU attention kernels; two KV heads keep the cache small.
SHAPE: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}


def config_data(tokenizer: Tokenizer) -> dict[str, object]:
    """The content of config.json, with both spellings of the keys that library versions disagree on."""
    end, pad = tokenizer.token_to_id(MESSAGE_END), tokenizer.token_to_id(END_OF_TEXT)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **SHAPE,
        "rope_theta": ROPE_THETA,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "bos_token_id": pad,
        "eos_token_id": end,
        "pad_token_id": pad,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def new_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """An untrained float32 model of the demo shape."""
    data = config_data(tokenizer) | {"dtype": "float32", "torch_dtype": "float32"}
    model = LlamaForCausalLM(LlamaConfig(**data))
    return model.float()


def write_folder(folder: Path, tokenizer: Tokenizer) -> None:
    """Write everything but the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, folder)
    end, pad = tokenizer.token_to_id(MESSAGE_END), tokenizer.token_to_id(END_OF_TEXT)
    generation = {
        "bos_token_id": pad,
        "eos_token_id": end,
        "pad_token_id": pad,
        "do_sample": False,
        "max_new_tokens": 128,
    }
    for name, data in (("config.json", config_data(tokenizer)), ("generation_config.json", generation)):
        write_json(folder / name, data)


def write_weights(folder: Path, model: LlamaForCausalLM) -> None:
    """Write model.safetensors in bf16; tied embeddings are stored once, under the input side's name."""
    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous().clone()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    replace_file(
        folder / "model.safetensors", lambda path: save_file(tensors, path, metadata={"format": "pt"})
    )


def write_json(path: Path, data: Mapping[str, object]) -> None:
    """Write readable JSON, atomically."""
    text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    replace_file(path, lambda target: target.write_text(text, encoding="utf-8"))


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a temporary file next to the target and rename it, so that no reader sees half a file."""
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    temporary.chmod(0o644)
    os.replace(temporary, path)
