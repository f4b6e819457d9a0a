"""What fits on a GPU: known figures, the engine's own arithmetic, and what must always hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv_pool import compute_kv_pool_size
from engine.loader import read_config
from ops.planning.arithmetic import PlanRequest, plan_engine
from ops.planning.shape import (
    GIB,
    GPUS,
    LINEAR_BYTES,
    PRESETS,
    Gpu,
    ModelShape,
    PlanError,
    find_model,
    read_shape,
)

LLAMA = PRESETS["llama-3.1-8b"]
AWQ = PRESETS["llama-3-8b-awq"]
A10_24 = Gpu("24 GB", 24 * GIB)
DEMO = Path(__file__).parents[2] / "models" / "demo"


def test_a_token_of_llama_3_1_8b_takes_128_kib() -> None:
    plan = plan_engine(PlanRequest(LLAMA, A10_24))
    assert plan.token_bytes == 128 * 1024


def test_weights_in_16_bits_take_16_gb_and_the_workspace_2_gb() -> None:
    plan = plan_engine(PlanRequest(LLAMA, A10_24))
    assert plan.weights_bytes == pytest.approx(16e9, rel=0.01)
    assert plan.workspace_bytes == pytest.approx(2 * GIB, rel=0.05)


def test_six_gib_of_kv_cache_are_3072_blocks_of_49152_tokens() -> None:
    # 24 - 16 - 2 = 6: a card whose memory leaves exactly that for the KV cache.
    plan = plan_engine(PlanRequest(LLAMA, A10_24))
    beside = plan.budget_bytes - plan.kv_bytes
    gpu = Gpu("6 GiB left", beside + 6 * GIB)
    plan = plan_engine(PlanRequest(LLAMA, gpu, utilization=1.0, prompt_tokens=1848, answer_tokens=200))
    assert (plan.blocks, plan.tokens, plan.sequences) == (3072, 49_152, 24)


def test_awq_on_24_gb_leaves_14_gb_which_a_shared_prefix_fills_with_128_sequences() -> None:
    plan = plan_engine(PlanRequest(AWQ, A10_24))
    assert 14 <= plan.kv_bytes / GIB < 15
    assert 100 <= plan.sequences < 128
    shared = plan_engine(PlanRequest(AWQ, A10_24, shared_prefix_tokens=192))
    assert shared.sequences == pytest.approx(128, abs=3)


def test_a_real_a10g_runs_85_to_90_sequences_in_steps_of_8192_tokens() -> None:
    plan = plan_engine(PlanRequest(AWQ, GPUS["A10G"]))
    assert 85 <= plan.recommended_max_num_seqs <= 90
    assert plan.recommended_max_num_batched_tokens == 8192
    assert any("128 is more than the" in warning for warning in plan.warnings)


def test_the_published_awq_checkpoint_is_of_the_computed_size() -> None:
    # The published checkpoint has 5.73 GB of safetensors.
    assert plan_engine(PlanRequest(AWQ, GPUS["A10G"])).weights_bytes == pytest.approx(5.73e9, rel=0.01)


def test_the_blocks_are_those_of_the_embedded_engines_arithmetic() -> None:
    shape, config = find_model(str(DEMO)), read_config(DEMO)
    for seqs, tokens in ((8, 256), (64, 2048)):
        request = PlanRequest(
            shape, Gpu("4 GiB", 4 * GIB), max_num_seqs=seqs, max_num_batched_tokens=tokens, prompt_tokens=100
        )
        plan = plan_engine(request)
        size = compute_kv_pool_size(
            4 * GIB,
            config,
            item_bytes=shape.item_bytes,
            utilization=request.utilization,
            weights_bytes=plan.weights_bytes,
            activation_bytes=plan.workspace_bytes,
        )
        assert plan.blocks == size.num_blocks


def test_parameters_are_counted_as_the_engine_counts_them() -> None:
    config, shape = read_config(DEMO), find_model(str(DEMO))
    matrices = 1 if shape.tie_embeddings else 2
    linear = shape.num_layers * shape.layer_parameters + matrices * shape.embedding_parameters
    assert linear == pytest.approx(config.num_parameters, rel=0.01)


def test_a_folder_with_weights_tells_their_real_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((DEMO / "config.json").read_bytes())
    assert find_model(str(tmp_path)).weights_bytes is None
    assert find_model(str(DEMO)).weights_bytes == (DEMO / "model.safetensors").stat().st_size
    computed = plan_engine(PlanRequest(find_model(str(tmp_path)), GPUS["A10G"])).weights_bytes
    assert computed == pytest.approx((DEMO / "model.safetensors").stat().st_size, rel=0.01)
    # If the engine quantizes while it loads, the size on the disk says nothing.
    assert find_model(str(DEMO), quantization="fp8").weights_bytes is None


def test_a_checkpoint_in_an_unknown_format_is_planned_for_the_engines_quantization(tmp_path: Path) -> None:
    config = config_of(quantization_config={"quant_method": "exl2"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    shape = find_model(str(tmp_path), quantization="fp8")
    assert (shape.weights_format, shape.weights_bytes) == ("fp8", None)
    with pytest.raises(PlanError, match=f"{tmp_path.name}: weights in 'exl2' are not counted here"):
        find_model(str(tmp_path))


def config_of(**changes: object) -> dict[str, object]:
    raw: dict[str, object] = json.loads((DEMO / "config.json").read_text())
    return {**raw, **changes}


def test_quantization_comes_from_the_engine_then_the_checkpoint_then_the_dtype() -> None:
    awq = config_of(quantization_config={"quant_method": "awq"})
    assert read_shape(awq, name="m").weights_format == "awq"
    assert read_shape(awq, name="m", quantization="awq_marlin").weights_format == "awq"
    assert read_shape(awq, name="m", quantization="fp8").weights_format == "fp8"
    assert read_shape(config_of(), name="m", dtype="float16").weights_format == "float16"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (config_of(num_local_experts=8), "num_local_experts"),
        (config_of(kv_lora_rank=512), "kv_lora_rank"),
        (config_of(quantization_config={"quant_method": "aqlm"}), "aqlm"),
        ({"hidden_size": 8}, "no 'num_attention_heads'"),
    ],
)
def test_a_model_that_is_not_counted_here_is_refused_with_the_field(
    raw: dict[str, object], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        read_shape(raw, name="m")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[]", "not a JSON object"),
        (
            '{"num_attention_heads": 0, "hidden_size": 1, "num_hidden_layers": 1, "intermediate_size": 1}',
            "misst",
        ),
        ('{"num_attention_heads": [], "hidden_size": 1}', "misstates a value"),
        ('{"num_attention_heads": Infinity, "hidden_size": 1}', "misstates a value"),
        ('{"quantization_config": null, "hidden_size": 1}', "has no 'num_attention_heads'"),
        ('{"quantization_config": "awq", "hidden_size": 1}', "misstates a value"),
        ('{"text_config": [1]}', "misstates a value"),
    ],
)
def test_a_config_that_describes_no_model_is_refused(tmp_path: Path, config: str, message: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(PlanError, match=message):
        find_model(str(tmp_path))


def test_a_model_that_is_nowhere_tells_of_the_presets(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"llama-3-8b-awq"):
        find_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(PlanError, match="not readable JSON"):
        find_model(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"utilization": 1.5}, "gpu_memory_utilization"),
        ({"prompt_tokens": 5000}, "max_model_len"),
        ({"max_model_len": 10_000}, "positions"),
        ({"tensor_parallel": 3}, "tensor_parallel_size"),
        ({"pipeline_parallel": 64}, "pipeline_parallel_size"),
        ({"max_num_batched_tokens": 64}, "max_num_batched_tokens"),
    ],
)
def test_what_the_engine_would_refuse_is_refused_here(changes: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_engine(replace(PlanRequest(AWQ, GPUS["A10G"]), **changes))


def test_settings_that_preempt_fail_to_start_or_waste_memory_give_a_warning() -> None:
    def warnings(**changes: object) -> str:
        return " ".join(plan_engine(replace(PlanRequest(AWQ, GPUS["A10G"]), **changes)).warnings)

    assert "preempts" in warnings(max_num_seqs=128)
    assert warnings(max_num_seqs=88) == ""
    assert "refuses to start" in warnings(gpu=Gpu("8 GiB", 8 * GIB))
    assert "half of what fits" in warnings(max_num_seqs=16)
    assert "0.95" in warnings(utilization=0.98, max_num_seqs=88)
    assert "several steps" in warnings(max_num_batched_tokens=512, max_num_seqs=88)


def test_more_gpus_share_weights_and_cache() -> None:
    one, two = (plan_engine(PlanRequest(LLAMA, GPUS["A10G"], tensor_parallel=n)) for n in (1, 2))
    assert two.token_bytes == one.token_bytes // 2
    assert two.weights_bytes == pytest.approx(one.weights_bytes / 2, rel=0.01)
    assert two.sequences > 5 * one.sequences, "weights no longer crowd out the cache"
    # More GPUs than KV heads: each holds one whole head.
    sixteen, eight = (plan_engine(PlanRequest(LLAMA, GPUS["A10G"], tensor_parallel=n)) for n in (16, 8))
    assert sixteen.token_bytes == eight.token_bytes
    staged = plan_engine(PlanRequest(LLAMA, GPUS["A10G"], pipeline_parallel=2))
    assert staged.token_bytes == one.token_bytes // 2 and staged.weights_bytes < one.weights_bytes * 0.6


shapes = st.builds(
    ModelShape,
    name=st.just("any"),
    num_layers=st.integers(1, 96),
    hidden_size=st.sampled_from([64, 1024, 4096, 8192]),
    intermediate_size=st.sampled_from([128, 4096, 14_336, 28_672]),
    num_heads=st.sampled_from([8, 32, 64]),
    num_kv_heads=st.sampled_from([1, 4, 8]),
    head_dim=st.sampled_from([32, 64, 128]),
    vocab_size=st.sampled_from([1000, 32_000, 128_256]),
    tie_embeddings=st.booleans(),
    max_position=st.just(131_072),
    weights_format=st.sampled_from(sorted(LINEAR_BYTES)),
)
requests = st.builds(
    PlanRequest,
    model=shapes,
    gpu=st.builds(Gpu, name=st.just("any"), memory_bytes=st.integers(1 * GIB, 200 * GIB)),
    utilization=st.floats(0.1, 1.0),
    tensor_parallel=st.sampled_from([1, 2, 4, 8]),
    pipeline_parallel=st.just(1),
    max_model_len=st.integers(2048, 32_768),
    block_size=st.sampled_from([8, 16, 32]),
    prompt_tokens=st.integers(1, 1500),
    answer_tokens=st.integers(1, 500),
    shared_prefix_tokens=st.integers(0, 3000),
    max_num_seqs=st.integers(1, 512),
    max_loras=st.integers(0, 16),
)


@given(request=requests, more=st.integers(0, 100 * GIB))
def test_more_memory_never_makes_fewer_blocks(request: PlanRequest, more: int) -> None:
    larger = replace(request, gpu=Gpu("larger", request.gpu.memory_bytes + more))
    small, large = plan_engine(request), plan_engine(larger)
    assert large.blocks >= small.blocks and large.sequences >= small.sequences
    assert large.recommended_max_num_batched_tokens >= small.recommended_max_num_batched_tokens


@given(request=requests)
def test_the_parts_add_up_to_the_share_and_the_recommendation_fits(request: PlanRequest) -> None:
    plan = plan_engine(request)
    parts = plan.weights_bytes + plan.lora_bytes + plan.workspace_bytes + plan.kv_bytes
    assert parts == plan.budget_bytes or (plan.kv_bytes == 0 and parts > plan.budget_bytes)
    block_bytes = plan.token_bytes * request.block_size
    assert plan.blocks * block_bytes <= plan.kv_bytes < (plan.blocks + 1) * block_bytes
    assert plan.full_sequences <= plan.sequences or request.context_tokens > request.max_model_len
    if plan.recommended_max_num_seqs:
        followed = replace(
            request,
            max_num_seqs=plan.recommended_max_num_seqs,
            max_num_batched_tokens=plan.recommended_max_num_batched_tokens,
        )
        again = plan_engine(followed)
        assert again.sequences >= plan.recommended_max_num_seqs
        assert not any("preempts" in warning for warning in again.warnings)
        assert again.recommended_max_num_seqs == plan.recommended_max_num_seqs


@given(request=requests, slots=st.integers(1, 16))
def test_adapters_and_longer_contexts_cost_room(request: PlanRequest, slots: int) -> None:
    plan = plan_engine(request)
    assert plan_engine(replace(request, max_loras=request.max_loras + slots)).blocks <= plan.blocks
    longer = replace(request, prompt_tokens=request.prompt_tokens + 100, max_model_len=40_000)
    assert plan_engine(longer).sequences <= plan.sequences
