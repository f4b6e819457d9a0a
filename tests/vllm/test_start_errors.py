"""vLLM's messages for a start that fails, and the messages that an operator reads instead."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engine.errors import (
    EngineKilled,
    EngineStartError,
    InvalidConfig,
    ModelNotFound,
    ModelTruncated,
    UnsupportedArchitecture,
)
from gateway.backends.vllm.child_logs import ChildLogLine
from gateway.backends.vllm.start_errors import MAX_LINE, check_folder, explain
from gateway.config.engine import EngineSection

SECTION = EngineSection(kind="vllm", model="models/demo")
POINTER = RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")


def error_of(text: str) -> ChildLogLine:
    return ChildLogLine("EngineCore", 1, logging.ERROR, "EngineCore failed to start.", text, "Traceback …")


@pytest.mark.parametrize(
    ("said", "kind", "tells"),
    [
        (
            "ValidationError: 1 validation error for ModelConfig\n  Value error, Model architectures "
            "['FancyForCausalLM'] are not supported for now. Supported architectures: dict_keys(['A'])",
            UnsupportedArchitecture,
            ["models/demo", "FancyForCausalLM"],
        ),
        (
            "ValidationError: 1 validation error for ModelConfig\n  Value error, User-specified max_model_len "
            "(99999) is greater than the derived max_model_len (max_position_embeddings=4096 or "
            "model_max_length=None in model's config.json).",
            InvalidConfig,
            ["engine.max_model_len", "99999", "at most 4096"],
        ),
        (
            "ValueError: To serve at least one request with the models's max seq len (4096), (0.16 GiB KV cache "
            "is needed, which is larger than the available KV cache memory (0.01 GiB). Based on the available "
            "memory, the estimated maximum model length is 416. Try increasing `gpu_memory_utilization`",
            InvalidConfig,
            ["engine.max_model_len", "0.16 GiB", "0.01 GiB", "at most 416", "engine.kv_cache_bytes"],
        ),
        (
            "ValueError: Available memory on node 0 (15.24/22.99 GiB) on kv cache allocation is less than "
            "requested memory for kv (900.0 GiB). Decrease",
            InvalidConfig,
            ["engine.kv_cache_bytes", "900.0 GiB", "15.24 GiB"],
        ),
        (
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
            InvalidConfig,
            ["engine.gpu_memory_utilization"],
        ),
        (
            "SafetensorError: Error while deserializing header: incomplete metadata, file not fully covered",
            ModelTruncated,
            ["models/demo", "fetch the model again"],
        ),
        ("RuntimeError: Cannot find any model weights with `models/demo`", ModelNotFound, ["no weights"]),
    ],
)  # fmt: skip
def test_known_causes_name_the_key_and_what_is_allowed(
    said: str, kind: type[EngineStartError], tells: list[str]
) -> None:
    for error in (explain(POINTER, [error_of(said)], SECTION), explain(Exception(said), [], SECTION)):
        assert type(error) is kind
        assert "\n" not in str(error)
        for part in tells:
            assert part in str(error)


def test_an_unknown_cause_is_vllms_first_error_on_one_line() -> None:
    lines = [
        error_of("KeyError: 'layers.0.odd'\nwith more"),
        error_of("Exception: WorkerProc initialization failed due to an exception. See stack trace"),
    ]
    assert str(explain(POINTER, lines, SECTION)) == "vLLM did not start: KeyError: 'layers.0.odd' with more"


def test_an_error_without_its_cause_is_still_shown_and_bounded() -> None:
    killed = explain(POINTER, [], SECTION)
    assert isinstance(killed, EngineKilled) and "initialization failed" in str(killed)
    assert len(str(explain(ValueError("x" * 5000), [], SECTION))) < MAX_LINE + 50


def test_our_own_errors_pass_as_they_are() -> None:
    mine = InvalidConfig("engine.num_threads: …")
    assert explain(mine, [error_of("ValueError: other")], SECTION) is mine


def test_a_folder_without_a_model_is_refused_before_vllm_is_imported(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        check_folder(SECTION.model_copy(update={"model": str(tmp_path)}))
    with pytest.raises(ModelNotFound, match="does not exist"):
        check_folder(SECTION.model_copy(update={"model": str(tmp_path / "gone")}))
    check_folder(SECTION.model_copy(update={"model": "org/name"}))
