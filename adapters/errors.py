"""Errors of the adapter registry.

::

    AdapterError
    ├── RegistryFileError   the registry's file cannot be used
    ├── UnknownAdapter      no adapter of that name is served
    ├── AdapterForbidden    the caller's key is limited to other adapters
    ├── AdapterNotHere      the adapter's files could not be fetched to this machine
    ├── AdapterRejected     the adapter did not pass the checks
    └── CatalogueError      the registry's rules forbid the change (``adapters.catalogue``)
        └── NotEvaluatedError  no passing evaluation, and no ``force`` (``adapters.changes``)
"""

from enum import StrEnum


class AdapterError(Exception):
    """An adapter cannot be used."""


class RegistryFileError(AdapterError):
    """The registry's file is missing, malformed or contradicts itself; the message names the place."""


class UnknownAdapter(AdapterError):
    """No adapter of that name is served; ``why``: the reason, if the registry knows the name; ``param``: the
    field that names it.
    """

    def __init__(
        self, adapter_id: str, known: tuple[str, ...], *, why: str | None = None, param: str = "adapter_id"
    ) -> None:
        self.param = param
        listed = ", ".join(known[:10]) or "none"
        super().__init__(f"adapter {adapter_id!r} {why or 'is not registered'}; known: {listed}")


class AdapterForbidden(AdapterError):
    """The caller's key may use other adapters only."""

    def __init__(self, adapter_id: str, allowed: tuple[str, ...], *, param: str = "adapter_id") -> None:
        self.param = param
        listed = ", ".join(allowed[:10]) or "none"
        super().__init__(f"the key may not use adapter {adapter_id!r}; allowed: {listed}")


class AdapterNotHere(AdapterError):
    """The adapter's files could not be fetched to this machine; the message says what to do."""


class Rejection(StrEnum):
    """Why an adapter is refused before an engine loads it; stable codes for scripts."""

    NOT_FOUND = "not_found"  # the folder or one of its two files is not there
    NOT_ALLOWED = "not_allowed"  # the bucket and prefix are not in the configuration
    OUTSIDE_FOLDER = "outside_folder"  # a symlink or an archive's name leads out of the folder
    TOO_LARGE = "too_large"  # more bytes or files than an adapter may have
    NOT_SAFETENSORS = "not_safetensors"  # weights in another format, pickle above all
    BAD_CONFIG = "bad_config"  # adapter_config.json cannot be read, or lacks a required value
    UNSUPPORTED = "unsupported"  # it needs a feature that the engines do not run
    WRONG_BASE = "wrong_base"  # trained for another base model
    RANK_TOO_HIGH = "rank_too_high"  # above max_lora_rank
    UNKNOWN_TARGET = "unknown_target"  # a module that the base model does not have
    TRUNCATED = "truncated"  # the file ends before what its header promises
    BAD_HEADER = "bad_header"  # the header contradicts itself
    BAD_SHAPE = "bad_shape"  # a tensor does not fit the base model, or the other of its pair
    MISSING_TENSOR = "missing_tensor"  # one tensor of a pair, or all of a target module
    NOT_FINITE = "not_finite"  # NaN or infinity among the weights
    WRONG_CHECKSUM = "wrong_checksum"  # not the expected bytes
    BAD_ARCHIVE = "bad_archive"  # the archive cannot be unpacked


class AdapterRejected(AdapterError):
    """The adapter failed a check: a stable code, and a line with place, value, and what is allowed."""

    def __init__(self, code: Rejection, detail: str) -> None:
        self.code = code
        self.detail = detail
        super().__init__(f"{code.value}: {detail}")
