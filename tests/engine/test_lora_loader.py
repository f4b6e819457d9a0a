"""An adapter folder that is wrong in any way is refused with one clear line, before it touches the engine."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.engine import Engine
from engine.errors import (
    AdapterMismatch,
    AdapterNotFound,
    AdapterNotLoaded,
    AdapterUnreadable,
    AdapterUnsupported,
    EngineAdapterError,
    NoAdapterRoom,
)
from tests.engine.adapters import write_adapter

MakeEngine = Callable[..., Engine]
WEIGHTS = "adapter_model.safetensors"
Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
V_B = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"


@pytest.fixture(scope="module")
def saved(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    return write_adapter(folder, tiny_model, seed=1, rank=4, targets=["q_proj", "v_proj"])


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "adapter"))


@pytest.fixture(scope="module")
def engine(make_engine: MakeEngine) -> Engine:
    return make_engine(max_lora_rank=8, max_loras=2)


def refusal(engine: Engine, folder: Path) -> EngineAdapterError:
    with pytest.raises(EngineAdapterError) as caught:
        engine.read_adapter(folder)
    assert "\n" not in str(caught.value)
    return caught.value


def edit(folder: Path, **changes: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_missing_folder_or_file_is_named(engine: Engine, folder: Path) -> None:
    gone = refusal(engine, folder / "nowhere")
    assert isinstance(gone, AdapterNotFound)
    assert str(gone) == f"adapter folder {folder / 'nowhere'} does not exist"
    for name in (WEIGHTS, "adapter_config.json"):
        (folder / name).unlink()
        assert name in str(refusal(engine, folder))


@pytest.mark.parametrize("name", ["adapter_config.json", WEIGHTS])
@pytest.mark.parametrize("keep", [0, 0.5])
def test_a_truncated_file_is_refused_with_its_folder(
    engine: Engine, folder: Path, name: str, keep: float
) -> None:
    path = folder / name
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    error = refusal(engine, folder)
    assert isinstance(error, AdapterUnreadable)
    assert str(folder) in str(error)


def test_a_config_that_says_something_else_is_refused_and_does_not_end_the_engine(
    engine: Engine, folder: Path
) -> None:
    for text in ("[]", "[" * 100_000, "{}", '{"r": "8", "target_modules": null}'):
        (folder / "adapter_config.json").write_text(text)
        assert isinstance(refusal(engine, folder), AdapterUnreadable)


def test_a_rank_above_the_engine_s_limit_is_refused(engine: Engine, folder: Path) -> None:
    edit(folder, r=9)
    error = refusal(engine, folder)
    assert isinstance(error, AdapterUnsupported)
    assert "r is 9; this engine runs 1 to 8" in str(error)


def test_a_scale_that_makes_weights_infinite_is_refused_as_it_would_spoil_the_base_model_s_rows(
    engine: Engine, folder: Path
) -> None:
    edit(folder, lora_alpha=1e300)
    assert isinstance(refused := refusal(engine, folder), AdapterUnsupported)
    assert "layer 0 has numbers that torch.float32 cannot hold" in str(refused)


def test_settings_without_a_meaning_for_inference_are_accepted(engine: Engine, folder: Path) -> None:
    edit(folder, lora_dropout=0.1, base_model_name_or_path="elsewhere", task_type="CAUSAL_LM", revision="x")
    assert engine.read_adapter(folder).layers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop(V_B), f"lacks the tensor {V_B}"),
        (lambda weights: weights.update({Q_A: torch.zeros(4, 65)}), "is (4, 65); rank and model say (4, 64)"),
        (lambda weights: weights.update({Q_A: torch.zeros(5, 64)}), "is (5, 64); rank and model say (4, 64)"),
        (lambda weights: weights.update({"lm_head.weight": torch.zeros(1)}), "no place for: lm_head.weight"),
    ],
)
def test_tensors_that_do_not_fit_the_model_are_named(
    engine: Engine, folder: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS)
    error = refusal(engine, folder)
    assert isinstance(error, AdapterMismatch)
    assert message in str(error)


def test_an_adapter_of_another_model_is_refused(engine: Engine, tmp_path: Path) -> None:
    from tests.engine.support import DEMO_MODEL

    error = refusal(engine, write_adapter(tmp_path / "other", DEMO_MODEL, seed=1, rank=4))
    assert isinstance(error, AdapterMismatch)


def test_no_more_adapters_than_max_loras_are_taken_and_a_replacement_needs_no_place(
    make_engine: MakeEngine, folder: Path
) -> None:
    engine = make_engine(max_loras=2)
    for name in ("a", "b", "b", "a"):
        engine.install_adapter(name, engine.read_adapter(folder))
    with pytest.raises(NoAdapterRoom, match="no room for adapter 'c': 2 are loaded"):
        engine.install_adapter("c", engine.read_adapter(folder))
    engine.remove_adapter("a")
    engine.install_adapter("c", engine.read_adapter(folder))
    for name in ("b", "c"):
        engine.remove_adapter(name)
    with pytest.raises(AdapterNotLoaded):
        engine.remove_adapter("a")
