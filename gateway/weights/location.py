"""Parses the three forms of ``engine.model``: a folder, a hub id, an S3 prefix."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from gateway.config.yaml_file import shown
from gateway.weights.errors import UnknownLocation

# File types of weights that the engines do not read if there are safetensors.
_OTHER_WEIGHTS = frozenset({".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".pt", ".pth"})
_WEIGHTS = _OTHER_WEIGHTS | {".safetensors"}
_OTHER_FOLDERS = frozenset({"original"})  # the folder of Meta's own checkpoint, next to the converted one


def is_small(name: str) -> bool:
    """Whether a file is not weights but, for example, configuration or tokenizer."""
    return PurePosixPath(name).suffix not in _WEIGHTS


def unneeded_patterns(*, small: bool) -> list[str]:
    """Return globs of unneeded files, for use if the list of files is unknown."""
    suffixes = _WEIGHTS if small else _OTHER_WEIGHTS
    return [*(f"*{suffix}" for suffix in sorted(suffixes)), *(f"{name}/*" for name in sorted(_OTHER_FOLDERS))]


def is_safe(name: str) -> bool:
    """Whether the path of a file name stays below its folder."""
    parts = name.split("/")
    return not any(part in ("", ".", "..") or "\\" in part or "\0" in part for part in parts)


def needed(names: Collection[str]) -> frozenset[str]:
    """Return the names of files that an engine reads: of weights only safetensors, if there are any."""
    if not any(name.endswith(".safetensors") for name in names):
        return frozenset(names)
    return frozenset(
        name
        for name in names
        if PurePosixPath(name).suffix not in _OTHER_WEIGHTS
        and PurePosixPath(name).parts[0] not in _OTHER_FOLDERS
    )


# Bucket names as documented by S3; hub ids are two words of letters, digits, `-`, `_` and `.`.
_S3 = re.compile(r"s3://(?P<bucket>[A-Za-z0-9][A-Za-z0-9.\-_]{1,254})(?:/(?P<prefix>.*))?")
_HUB = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<revision>[\w.\-/]{1,255}))?"
)
ALLOWED = "a local folder, a hub id (org/name, hf://org/name@revision) or s3://bucket/prefix"


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of the Hugging Face hub; ``revision`` is a branch, tag or commit, None for the main branch."""

    repo: str
    revision: str | None = None

    @property
    def url(self) -> str:
        return f"hf://{self.repo}" + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True, slots=True)
class S3Prefix:
    """The keys of a bucket that start with ``prefix/``; an empty prefix is the whole bucket."""

    bucket: str
    prefix: str

    @property
    def url(self) -> str:
        """The prefix as written in the configuration."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def holds(self, other: "S3Prefix") -> bool:
        """Whether ``other`` is this prefix or below it; False with ``..``, which some servers resolve."""
        if other.bucket != self.bucket or not (other.prefix == "" or is_safe(other.prefix)):
            return False
        return f"{other.prefix}/".startswith(self.start)

    @property
    def start(self) -> str:
        return f"{self.prefix}/" if self.prefix else ""


Location = Path | HubModel | S3Prefix
"""A path is a folder on this machine; the engine reports a missing one."""


def s3_prefix(given: str) -> S3Prefix:
    """Parse an address of S3. Raises UnknownLocation."""
    found = _S3.fullmatch(given)
    if found is None:
        name = "a bucket's name is of 2 to 255 letters, digits, '.', '_' and '-'"
        raise UnknownLocation(f"{shown(given)} is not s3://bucket/prefix; {name}")
    return S3Prefix(found["bucket"], (found["prefix"] or "").strip("/"))


def locate(given: str) -> Location:
    """Parse an address. Raises UnknownLocation.

    An existing folder has precedence over an equal hub id. An ``org/name`` whose first part is a folder here
    is a path, so that a typing error in ``models/demo`` is not looked up on the internet.
    """
    if given.startswith("s3://"):
        return s3_prefix(given)
    if given.startswith("hf://"):
        found = _HUB.fullmatch(given.removeprefix("hf://"))
        if found is None:
            raise UnknownLocation(f"{shown(given)} is not hf://org/name or hf://org/name@revision")
        return HubModel(found["repo"], found["revision"])
    if "://" in given:
        raise UnknownLocation(f"{shown(given)} is not known here; allowed: {ALLOWED}")
    found = _HUB.fullmatch(given)
    path = Path(given)
    if found is None or path.exists() or Path(path.parts[0]).is_dir():
        return path
    return HubModel(found["repo"], found["revision"])
