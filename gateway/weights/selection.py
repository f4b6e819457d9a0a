"""The files of a model that an engine needs."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import PurePosixPath

# Weights in formats that the engines do not read when there are safetensors.
_OTHER_WEIGHTS = frozenset({".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".pt", ".pth"})
_WEIGHTS = _OTHER_WEIGHTS | {".safetensors"}
# Meta's own checkpoint, next to the converted one.
_OTHER_FOLDERS = frozenset({"original"})


def is_small(name: str) -> bool:
    """Whether a file is configuration or tokenizer rather than weights."""
    return PurePosixPath(name).suffix not in _WEIGHTS


def unneeded_patterns(*, small: bool) -> list[str]:
    """Globs of unneeded files, for when the list of files is unknown."""
    suffixes = _WEIGHTS if small else _OTHER_WEIGHTS
    return [*(f"*{suffix}" for suffix in sorted(suffixes)), *(f"{name}/*" for name in sorted(_OTHER_FOLDERS))]


def is_safe(name: str) -> bool:
    """Whether the path of the name stays below its folder."""
    parts = name.split("/")
    return not any(part in ("", ".", "..") or "\\" in part or "\0" in part for part in parts)


def needed(names: Collection[str]) -> frozenset[str]:
    """Those of ``names`` that an engine reads: one format of the weights, safetensors when there are any."""
    if not any(name.endswith(".safetensors") for name in names):
        return frozenset(names)
    return frozenset(
        name
        for name in names
        if PurePosixPath(name).suffix not in _OTHER_WEIGHTS
        and PurePosixPath(name).parts[0] not in _OTHER_FOLDERS
    )
