"""Admission of an adapter to the registry: everything that can be known without an engine is checked here.

An adapter is a folder as PEFT saves it: ``adapter_config.json`` and ``adapter_model.safetensors``. Nothing of
it is executed or unpickled, and the weights are read in pieces. All functions block: call them in a thread.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters.base_model import BaseModel
from adapters.finite import is_finite
from adapters.rejection import AdapterRejected, Rejection
from adapters.safetensors_header import TensorPlace, read_header

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
# A rank-256 adapter of a 70B model has about 3.3 GB.
MAX_BYTES = 8 << 30
MAX_FILES = 64
_HASH_BYTES = 1 << 20

# Weights in formats that run code when loaded, or may.
_OTHER_WEIGHTS = frozenset(
    {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npz", ".npy", ".joblib", ".h5"}
)
_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?:.*\.)?layers\.(?P<layer>[0-9]+)\.(?:[a-z_]+\.)*(?P<module>[a-z0-9_]+)"
    r"\.lora_(?P<side>[AB])(?:\.default)?\.weight"
)
# Keys that change what an adapter computes in ways that neither vLLM nor the embedded engine runs.
_MUST_BE_EMPTY = (
    "use_dora",
    "use_qalora",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "megatron_config",
    "trainable_token_indices",
    "fan_in_fan_out",
    "exclude_modules",
    "alora_invocation_tokens",
)


@dataclass(frozen=True, slots=True)
class Verified:
    """What is known of an adapter that may be used.

    Args:
        rank: of the updates.
        alpha: their scale, before the division by the rank.
        target_modules: sorted names of the modules it adapts.
        size_bytes: of all files.
        sha256: of the manifest: each file's name, size and SHA-256.
        base_name: the base model as the adapter's own configuration names it.
        shapes_checked: whether the base model's shapes were known.
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    size_bytes: int
    sha256: str
    base_name: str
    shapes_checked: bool


def verify(folder: Path, base: BaseModel, *, sha256: str | None = None) -> Verified:
    """Check a folder against the base model.

    Args:
        folder: the adapter.
        base: what it must fit.
        sha256: the manifest's digest, when it was promised.

    Raises:
        AdapterRejected: the first thing that is wrong.
    """
    files = list_files(folder)
    digest = manifest_sha256(folder, files)
    if sha256 is not None and sha256.lower() != digest:
        raise AdapterRejected(
            Rejection.WRONG_CHECKSUM, f"{folder.name}: the files' SHA-256 is {digest}, not {sha256.lower()}"
        )
    config = _read_config(folder)
    base_name = _check_base(config, base)
    rank, alpha = _check_rank(config, base)
    targets = _check_targets(config, base)
    weights = folder / WEIGHTS_FILE
    tensors = read_header(weights)
    _check_tensors(tensors, rank, targets, base)
    with weights.open("rb") as file:
        for tensor in tensors.values():
            if not is_finite(file, tensor):
                raise AdapterRejected(
                    Rejection.NOT_FINITE, f"{WEIGHTS_FILE}: tensor {tensor.name!r} holds NaN or infinity"
                )
    size = sum(files.values())
    return Verified(rank, alpha, targets, size, digest, base_name, bool(base.shapes))


def list_files(folder: Path) -> Mapping[str, int]:
    """The folder's files and their sizes, by path in the folder.

    Raises:
        AdapterRejected: one is missing, is no plain file, leads out of the folder, holds weights in another
            format, or there is too much.
    """
    if not folder.is_dir():
        raise AdapterRejected(Rejection.NOT_FOUND, f"{folder.name}: no such folder")
    home = folder.resolve()
    found: dict[str, int] = {}
    for path in _walk(folder):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() and home not in path.resolve().parents:
            raise AdapterRejected(Rejection.OUTSIDE_FOLDER, f"{name}: a symlink that leads out of the folder")
        if path.is_dir():
            if path.is_symlink():
                raise AdapterRejected(Rejection.OUTSIDE_FOLDER, f"{name}: a symlink to a folder")
            continue
        if not path.is_file():
            raise AdapterRejected(Rejection.NOT_FOUND, f"{name}: is no plain file")
        if path.suffix.lower() in _OTHER_WEIGHTS:
            raise AdapterRejected(
                Rejection.NOT_SAFETENSORS, f"{name}: only {WEIGHTS_FILE} is taken, as nothing in it can run"
            )
        found[name] = path.stat().st_size
        if len(found) > MAX_FILES or sum(found.values()) > MAX_BYTES:
            raise AdapterRejected(
                Rejection.TOO_LARGE, f"{folder.name}: more than {MAX_FILES} files or {MAX_BYTES >> 30} GiB"
            )
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if name not in found:
            raise AdapterRejected(Rejection.NOT_FOUND, f"{folder.name}: has no {name}")
    return found


def manifest_sha256(folder: Path, files: Mapping[str, int]) -> str:
    """One digest for all files: SHA-256 over ``name, size, SHA-256`` lines in the order of the names.

    Only the two files that an engine reads count: a readme may change.
    """
    manifest = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        digest = hashlib.sha256()
        with (folder / name).open("rb") as file:
            while piece := file.read(_HASH_BYTES):
                digest.update(piece)
        manifest.update(f"{name} {files[name]} {digest.hexdigest()}\n".encode())
    return manifest.hexdigest()


def _walk(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)


def _read_config(folder: Path) -> Mapping[str, Any]:
    path = folder / CONFIG_FILE
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise AdapterRejected(Rejection.BAD_CONFIG, f"{CONFIG_FILE}: more than {MAX_CONFIG_BYTES:,} bytes")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        why = str(error).split("\n")[0]
        raise AdapterRejected(Rejection.BAD_CONFIG, f"{CONFIG_FILE}: not valid JSON: {why}") from None
    if not isinstance(config, dict):
        raise AdapterRejected(Rejection.BAD_CONFIG, f"{CONFIG_FILE}: must be a JSON object")
    if config.get("peft_type") != "LORA":
        raise AdapterRejected(
            Rejection.UNSUPPORTED, f"{CONFIG_FILE}: peft_type is {config.get('peft_type')!r}; allowed: 'LORA'"
        )
    if config.get("bias", "none") != "none":
        raise AdapterRejected(
            Rejection.UNSUPPORTED, f"{CONFIG_FILE}: bias is {config['bias']!r}; allowed: 'none'"
        )
    for key in _MUST_BE_EMPTY:
        if config.get(key):
            raise AdapterRejected(
                Rejection.UNSUPPORTED, f"{CONFIG_FILE}: {key} is set; engines do not run it"
            )
    return config


def _check_base(config: Mapping[str, Any], base: BaseModel) -> str:
    name = config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise AdapterRejected(Rejection.BAD_CONFIG, f"{CONFIG_FILE}: base_model_name_or_path is missing")
    if not base.serves(name):
        raise AdapterRejected(
            Rejection.WRONG_BASE, f"{CONFIG_FILE}: trained for {name!r}; served here: {base.model_id!r}"
        )
    return name


def _check_rank(config: Mapping[str, Any], base: BaseModel) -> tuple[int, float]:
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise AdapterRejected(
            Rejection.BAD_CONFIG, f"{CONFIG_FILE}: r is {rank!r}; allowed: a whole number from 1"
        )
    if rank > base.max_lora_rank:
        raise AdapterRejected(
            Rejection.RANK_TOO_HIGH, f"{CONFIG_FILE}: r is {rank}; allowed: at most {base.max_lora_rank}"
        )
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) < float("inf"):
        raise AdapterRejected(
            Rejection.BAD_CONFIG, f"{CONFIG_FILE}: lora_alpha is {alpha!r}; allowed: a number"
        )
    return rank, float(alpha)


def _check_targets(config: Mapping[str, Any], base: BaseModel) -> tuple[str, ...]:
    targets = config.get("target_modules")
    if not isinstance(targets, list) or not targets or not all(isinstance(one, str) for one in targets):
        raise AdapterRejected(
            Rejection.BAD_CONFIG, f"{CONFIG_FILE}: target_modules must be a list of module names"
        )
    names = tuple(sorted({one.rsplit(".", 1)[-1] for one in targets}))
    unknown = [name for name in names if base.shapes and name not in base.shapes]
    if unknown:
        raise AdapterRejected(
            Rejection.UNKNOWN_TARGET,
            f"{CONFIG_FILE}: target_modules has {unknown[0]!r}; allowed: {', '.join(sorted(base.shapes))}",
        )
    return names


def _check_tensors(
    tensors: Mapping[str, TensorPlace], rank: int, targets: tuple[str, ...], base: BaseModel
) -> None:
    pairs: dict[tuple[int, str], dict[str, TensorPlace]] = defaultdict(dict)
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None or match["module"] not in targets:
            raise AdapterRejected(
                Rejection.UNKNOWN_TARGET, f"{WEIGHTS_FILE}: tensor {name!r} belongs to no target module"
            )
        layer = int(match["layer"])
        if base.layers and layer >= base.layers:
            raise AdapterRejected(
                Rejection.BAD_SHAPE, f"{WEIGHTS_FILE}: {name!r}: the base model has {base.layers} layers"
            )
        if match["side"] in pairs[layer, match["module"]]:
            raise AdapterRejected(Rejection.BAD_HEADER, f"{WEIGHTS_FILE}: {name!r} stands there twice")
        pairs[layer, match["module"]][match["side"]] = tensor
    for (layer, module), pair in pairs.items():
        _check_pair(layer, module, pair, rank, base.shapes.get(module))
    absent = set(targets) - {module for _, module in pairs}
    if absent:
        raise AdapterRejected(
            Rejection.MISSING_TENSOR, f"{WEIGHTS_FILE}: no tensors for target module {sorted(absent)[0]!r}"
        )


def _check_pair(
    layer: int, module: str, pair: Mapping[str, TensorPlace], rank: int, shape: tuple[int, int] | None
) -> None:
    where = f"{WEIGHTS_FILE}: layer {layer}, {module}"
    if set(pair) != {"A", "B"}:
        raise AdapterRejected(
            Rejection.MISSING_TENSOR, f"{where}: lora_{'B' if 'A' in pair else 'A'} is missing"
        )
    a, b = pair["A"].shape, pair["B"].shape
    wanted_a = (rank, shape[0]) if shape else (rank, a[-1] if a else 0)
    wanted_b = (shape[1], rank) if shape else (b[0] if b else 0, rank)
    for side, found, wanted in (("A", a, wanted_a), ("B", b, wanted_b)):
        if found != wanted:
            raise AdapterRejected(
                Rejection.BAD_SHAPE, f"{where}: lora_{side} is {list(found)}; allowed: {list(wanted)}"
            )
