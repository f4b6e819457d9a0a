"""Reads an adapter's ``adapter_config.json`` as PEFT writes it, and checks that the engines can run it."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters.base_model import BaseModel
from adapters.errors import AdapterRejected, Rejection

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
MAX_ALPHA = sys.float_info.max  # JSON may have larger whole numbers

# Keys that this module or the engines read, and keys without an effect on the computation. Any other key that
# is set changes the computation in a way that no engine runs, and vLLM would ignore it silently.
_READ = frozenset(("peft_type", "bias", "r", "lora_alpha", "use_rslora", "target_modules"))
_NO_EFFECT = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"),
        *("task_type", "lora_dropout", "init_lora_weights", "corda_config", "eva_config", "loftq_config"),
        *("lora_ga_config", "ensure_weight_tying", "layers_pattern", "megatron_core", "qalora_group_size"),
        "runtime_config",
    )
)
# Initializations that leave the base model's weights unchanged. The others (PiSSA, OLoRA …) subtract from
# these weights, which PEFT reverts when it converts the adapter.
_INITIALIZATIONS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Rank and scale, the sorted names of the target modules, the base model as the adapter names it."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    base_name: str


def read_config(folder: Path, base: BaseModel) -> PeftConfig:
    """Read and check the adapter's configuration. Blocks. Raises AdapterRejected at the first problem."""
    config = _read(folder)
    _check_kind(config, base)
    base_name = _check_base(config, base)
    rank, alpha = _check_rank(config, base)
    return PeftConfig(rank, alpha, _check_targets(config, base), base_name)


def _refused(code: Rejection, detail: str) -> AdapterRejected:
    return AdapterRejected(code, f"{CONFIG_FILE}: {detail}")


def _read(folder: Path) -> Mapping[str, Any]:
    path = folder / CONFIG_FILE
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise _refused(Rejection.BAD_CONFIG, f"more than {MAX_CONFIG_BYTES:,} bytes")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        why = str(error).split("\n")[0]
        raise _refused(Rejection.BAD_CONFIG, f"not valid JSON: {why}") from None
    if not isinstance(config, dict):
        raise _refused(Rejection.BAD_CONFIG, "must be a JSON object")
    return config


def _check_kind(config: Mapping[str, Any], base: BaseModel) -> None:
    if config.get("peft_type") != "LORA":
        raise _refused(Rejection.UNSUPPORTED, f"peft_type is {config.get('peft_type')!r}; allowed: 'LORA'")
    if config.get("bias", "none") != "none":
        raise _refused(Rejection.UNSUPPORTED, f"bias is {config['bias']!r}; allowed: 'none'")
    start = config.get("init_lora_weights", True)
    if start not in _INITIALIZATIONS:
        raise _refused(
            Rejection.UNSUPPORTED,
            f"init_lora_weights is {start!r}, which changes the base model's weights; "
            "allowed: true, or the adapter converted by PEFT (path_initial_model_for_weight_conversion)",
        )
    for key in config:
        # On engines where an adapter may adapt only some layers, its tensors show which.
        known = key in _READ or key in _NO_EFFECT or (key == "layers_to_transform" and not base.embedded)
        if config[key] and not known:
            raise _refused(Rejection.UNSUPPORTED, f"{key} is set; engines do not run it")


def _check_base(config: Mapping[str, Any], base: BaseModel) -> str:
    name = config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise _refused(Rejection.BAD_CONFIG, "base_model_name_or_path is missing")
    if not base.serves(name):
        raise _refused(Rejection.WRONG_BASE, f"trained for {name!r}; served here: {base.model_id!r}")
    return name


def _check_rank(config: Mapping[str, Any], base: BaseModel) -> tuple[int, float]:
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise _refused(Rejection.BAD_CONFIG, f"r is {rank!r}; allowed: a whole number from 1")
    if rank > base.max_lora_rank:
        raise _refused(Rejection.RANK_TOO_HIGH, f"r is {rank}; allowed: at most {base.max_lora_rank}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= MAX_ALPHA:
        raise _refused(Rejection.BAD_CONFIG, f"lora_alpha is {alpha!r}; allowed: a number")
    return rank, float(alpha)


def _check_targets(config: Mapping[str, Any], base: BaseModel) -> tuple[str, ...]:
    targets = config.get("target_modules")
    if not isinstance(targets, list) or not targets or not all(isinstance(one, str) for one in targets):
        raise _refused(Rejection.BAD_CONFIG, "target_modules must be a list of module names")
    # The embedded engine uses the names unchanged, others only their last part.
    names = tuple(sorted({one if base.embedded else one.rsplit(".", 1)[-1] for one in targets}))
    unknown = [name for name in names if base.shapes and name not in base.shapes]
    if unknown:
        raise _refused(
            Rejection.UNKNOWN_TARGET,
            f"target_modules has {unknown[0]!r}; allowed: {', '.join(sorted(base.shapes))}",
        )
    return names
