"""A model folder that is wrong in any way ends the start with one clear line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.build import build_engine
from engine.engine import Engine
from engine.errors import (
    EngineStartError,
    InvalidConfig,
    ModelNotFound,
    ModelTruncated,
    UnsupportedArchitecture,
)
from engine.loader import read_config
from engine.values import EngineConfig
from tests.engine.support import greedy, random_prompts, run_prompts, write_tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def start_error(folder: Path, **options: object) -> EngineStartError:
    config = EngineConfig(str(folder), num_threads=1, **options)  # type: ignore[arg-type]
    with pytest.raises(EngineStartError) as caught:
        build_engine(config)
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    error = start_error(tmp_path / "nowhere")
    assert isinstance(error, ModelNotFound)
    assert str(error) == f"model folder {tmp_path / 'nowhere'} does not exist"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    error = start_error(folder)
    assert isinstance(error, ModelNotFound)
    assert name in str(error)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("keep", [0, 0.5])
def test_a_truncated_file_is_named(folder: Path, name: str, keep: float) -> None:
    path = folder / name
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    error = start_error(folder)
    assert isinstance(error, ModelTruncated)
    assert name in str(error)


def test_an_index_without_a_map_of_its_files_is_named(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ["model.safetensors"]}')
    error = start_error(folder)
    assert isinstance(error, ModelTruncated) and "weight_map" in str(error)


def test_a_generation_config_with_an_empty_end_token_leaves_that_of_the_model(folder: Path) -> None:
    edit_config(folder, eos_token_id=7)
    (folder / "generation_config.json").write_text('{"eos_token_id": null}')
    assert read_config(folder).eos_token_ids == (7,)


def test_another_architecture_is_named(folder: Path) -> None:
    edit_config(folder, architectures=["GPT2LMHeadModel"])
    error = start_error(folder)
    assert isinstance(error, UnsupportedArchitecture)
    assert "GPT2LMHeadModel" in str(error)


@pytest.mark.parametrize(
    "change",
    [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
    ],
)
def test_a_variant_that_is_not_implemented_is_refused(folder: Path, change: dict[str, object]) -> None:
    edit_config(folder, **change)
    assert isinstance(start_error(folder), UnsupportedArchitecture)


def test_a_config_that_lacks_or_misstates_a_value_is_refused(folder: Path) -> None:
    edit_config(folder, hidden_size="many")
    assert isinstance(start_error(folder), ModelTruncated)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert "num_attention_heads" in str(start_error(folder))
    (folder / "config.json").write_text("[]")
    assert "not a JSON object" in str(start_error(folder))


def test_a_tensor_that_is_missing_or_of_another_shape_is_named(folder: Path) -> None:
    edit_config(folder, intermediate_size=200)
    assert "gate_proj.weight is (160, 64), config.json says (200, 64)" in str(start_error(folder))
    edit_config(folder, intermediate_size=160)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.v_proj.weight"]
    save_file(weights, folder / "model.safetensors")
    assert "lacks the tensor model.layers.1.self_attn.v_proj.weight" in str(start_error(folder))


@pytest.mark.parametrize("options", [{"dtype": "int3"}, {"kv_cache_bytes": 100}])
def test_a_setting_that_the_engine_cannot_run_with_is_refused(
    folder: Path, options: dict[str, object]
) -> None:
    assert isinstance(start_error(folder, **options), InvalidConfig)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_cuda_device_that_is_not_there_is_told_with_its_key_and_what_is_allowed(folder: Path) -> None:
    told = "engine.device is 'cuda', but there is no CUDA device; allowed: cpu or auto"
    assert str(start_error(folder, device="cuda")) == told


def test_a_sharded_checkpoint_gives_the_same_tokens(
    folder: Path, tmp_path: Path, make_engine: Callable[..., Engine]
) -> None:
    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).save_pretrained(
        sharded, max_shard_size="100KB"
    )
    (sharded / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    shards = sorted(sharded.glob("model-*.safetensors"))
    assert len(shards) > 1
    prompts = random_prompts(4, 512)
    assert run_prompts(make_engine(sharded), prompts, greedy(8)) == run_prompts(
        make_engine(folder), prompts, greedy(8)
    )
    shards[-1].unlink()
    error = start_error(sharded)
    assert isinstance(error, ModelNotFound)
    assert shards[-1].name in str(error)


def test_the_old_spelling_of_rope_settings_reads_the_same(folder: Path) -> None:
    before = read_config(folder)
    raw = json.loads((folder / "config.json").read_text())
    rope = raw.pop("rope_parameters")
    theta = rope.pop("rope_theta")
    (folder / "config.json").write_text(json.dumps({**raw, "rope_scaling": rope, "rope_theta": theta}))
    assert read_config(folder) == before


def test_the_kv_arithmetic_of_an_8b_model_is_that_of_the_design(folder: Path) -> None:
    edit_config(
        folder,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        hidden_size=4096,
    )
    token_bytes = read_config(folder).kv_bytes_per_token(2)
    assert token_bytes == 128 * 1024
    assert token_bytes * 16 == 2 * 1024**2


def test_the_parameter_count_is_that_of_the_checkpoint(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    assert read_config(folder).num_parameters == sum(tensor.numel() for tensor in weights.values())
