"""Checks an adapter before its registration, as far as possible without an engine.

An adapter is a folder as PEFT saves it: ``adapter_config.json`` and ``adapter_model.safetensors``. Nothing in
it is executed or unpickled, and the weights are read in pieces. All functions block: call them in a thread.
"""

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from adapters.base_model import BaseModel
from adapters.errors import AdapterRejected, Rejection
from adapters.peft_config import CONFIG_FILE, PeftConfig, read_config
from adapters.safetensors import TensorPlace, is_finite, read_header

WEIGHTS_FILE = "adapter_model.safetensors"
# A rank-256 adapter of a 70B model has about 3.3 GB.
MAX_BYTES = 8 << 30
MAX_FILES = 64

# Formats of weights that may run code when loaded.
_OTHER_WEIGHTS = frozenset(
    {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npz", ".npy", ".joblib", ".h5"}
)
# PEFT's names for a causal model; engines find tensors by these names only.
_TENSOR = re.compile(
    r"base_model\.model\.(?:.*\.)?layers\.(?P<layer>[0-9]{1,9})\.(?:[a-z_]+\.)*(?P<module>[a-z0-9_]+)"
    r"\.lora_(?P<side>[AB])\.weight"
)


@dataclass(frozen=True, slots=True)
class Verified(PeftConfig):
    """The properties of an adapter that passed the checks.

    ``sha256`` is the hash of the manifest (each file's name, size and SHA-256); ``shapes_checked``: the base
    model's shapes were known.
    """

    size_bytes: int
    sha256: str
    shapes_checked: bool


def verify(folder: Path, base: BaseModel, *, sha256: str | None = None) -> Verified:
    """Check a folder against the base model; ``sha256`` is the expected digest of the manifest. Raises
    AdapterRejected."""
    files = list_files(folder)
    digest = manifest_sha256(folder, files)
    if sha256 is not None and sha256.lower() != digest:
        raise AdapterRejected(
            Rejection.WRONG_CHECKSUM, f"the files' SHA-256 is {digest}, not {sha256.lower()}"
        )
    config = read_config(folder, base)
    weights = folder / WEIGHTS_FILE
    tensors = read_header(weights)
    _check_tensors(tensors, config.rank, config.target_modules, base)
    with weights.open("rb") as file:
        for tensor in tensors.values():
            if not is_finite(file, tensor):
                raise _refused(Rejection.NOT_FINITE, f"tensor {tensor.name!r} holds NaN or infinity")
    size = sum(files.values())
    return Verified(**asdict(config), size_bytes=size, sha256=digest, shapes_checked=bool(base.shapes))


def list_files(folder: Path) -> Mapping[str, int]:
    """The sizes of the folder's files in bytes, by path in the folder.

    Raises AdapterRejected when a file is missing, is no plain file, leads out of the folder or holds weights
    in another format, or when there are too many files or bytes.
    """
    if not folder.is_dir():
        what = "is neither a folder nor a .tar.gz, .tgz or .tar" if folder.exists() else "no such folder"
        raise AdapterRejected(Rejection.NOT_FOUND, what)
    home = folder.resolve()
    found: dict[str, int] = {}
    for path in _walk(folder):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() and home not in Path(os.path.realpath(path)).parents:
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
                Rejection.TOO_LARGE, f"more than {MAX_FILES} files or {MAX_BYTES >> 30} GiB"
            )
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if name not in found:
            raise AdapterRejected(Rejection.NOT_FOUND, f"has no {name}")
    return found


def manifest_sha256(folder: Path, files: Mapping[str, int]) -> str:
    """One SHA-256 for the two files that an engine reads, over ``name, size, SHA-256`` lines in the order of
    the names."""
    manifest = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        with (folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        manifest.update(f"{name} {files[name]} {digest.hexdigest()}\n".encode())
    return manifest.hexdigest()


def _refused(code: Rejection, detail: str) -> AdapterRejected:
    return AdapterRejected(code, f"{WEIGHTS_FILE}: {detail}")


def _walk(folder: Path) -> Iterator[Path]:
    folders = [folder]
    while folders:
        for path in sorted(folders.pop().iterdir()):
            yield path
            if path.is_dir() and not path.is_symlink():
                folders.append(path)


def _check_tensors(
    tensors: Mapping[str, TensorPlace], rank: int, targets: tuple[str, ...], base: BaseModel
) -> None:
    pairs: dict[tuple[int, str], dict[str, TensorPlace]] = defaultdict(dict)
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None or match["module"] not in targets:
            raise _refused(Rejection.UNKNOWN_TARGET, f"tensor {name!r} belongs to no target module")
        layer, wanted = int(match["layer"]), base.tensor_name(**match.groupdict())
        if wanted is not None and name != wanted:
            raise _refused(Rejection.UNKNOWN_TARGET, f"tensor {name!r}; allowed: {wanted!r}")
        if base.layers and layer >= base.layers:
            raise _refused(Rejection.BAD_SHAPE, f"{name!r}: the base model has {base.layers} layers")
        if match["side"] in pairs[layer, match["module"]]:
            raise _refused(Rejection.BAD_HEADER, f"{name!r} is there twice")
        pairs[layer, match["module"]][match["side"]] = tensor
    for (layer, module), pair in pairs.items():
        _check_pair(layer, module, pair, rank, base.shapes.get(module))
    absent = set(targets) - {module for _, module in pairs}
    if absent:
        raise _refused(Rejection.MISSING_TENSOR, f"no tensors for target module {sorted(absent)[0]!r}")
    for layer in range(base.layers if base.embedded else 0):
        for module in targets:
            if (layer, module) not in pairs:
                raise _refused(
                    Rejection.MISSING_TENSOR,
                    f"no tensors for layer {layer}, {module}; the embedded engine adapts all "
                    f"{base.layers} layers",
                )


def _check_pair(
    layer: int, module: str, pair: Mapping[str, TensorPlace], rank: int, shape: tuple[int, int] | None
) -> None:
    where = f"layer {layer}, {module}"
    if set(pair) != {"A", "B"}:
        raise _refused(Rejection.MISSING_TENSOR, f"{where}: lora_{'B' if 'A' in pair else 'A'} is missing")
    a, b = pair["A"].shape, pair["B"].shape
    wanted_a = (rank, shape[0]) if shape else (rank, a[-1] if a else 0)
    wanted_b = (shape[1], rank) if shape else (b[0] if b else 0, rank)
    for side, found, wanted in (("A", a, wanted_a), ("B", b, wanted_b)):
        if found != wanted:
            raise _refused(
                Rejection.BAD_SHAPE, f"{where}: lora_{side} is {list(found)}; allowed: {list(wanted)}"
            )
