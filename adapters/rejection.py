"""Why an adapter is refused before an engine ever sees it: a closed set of reasons."""

from __future__ import annotations

from enum import StrEnum

from adapters.errors import AdapterError


class Rejection(StrEnum):
    """Stable codes; operators' scripts may rely on them."""

    NOT_FOUND = "not_found"  # the folder or one of its two files is not there
    OUTSIDE_FOLDER = "outside_folder"  # a symlink or an archive's name leads out of the folder
    TOO_LARGE = "too_large"  # more bytes or files than an adapter has
    NOT_SAFETENSORS = "not_safetensors"  # weights in another format, pickle above all
    BAD_CONFIG = "bad_config"  # adapter_config.json cannot be read, or lacks what it must say
    UNSUPPORTED = "unsupported"  # it asks for what engines here do not run
    WRONG_BASE = "wrong_base"  # trained for another base model
    RANK_TOO_HIGH = "rank_too_high"  # above max_lora_rank
    UNKNOWN_TARGET = "unknown_target"  # a module that the base model does not have
    TRUNCATED = "truncated"  # the file ends before what its header promises
    BAD_HEADER = "bad_header"  # the header contradicts itself
    BAD_SHAPE = "bad_shape"  # a tensor does not fit the base model, or its partner
    MISSING_TENSOR = "missing_tensor"  # one of a pair, or a whole target, is not there
    NOT_FINITE = "not_finite"  # NaN or infinity among the weights
    WRONG_CHECKSUM = "wrong_checksum"  # not the bytes that were promised
    BAD_ARCHIVE = "bad_archive"  # the archive cannot be unpacked


class AdapterRejected(AdapterError):
    """The adapter cannot be used.

    Args:
        code: the stable reason.
        detail: one line: where, what was found, what is allowed.
    """

    def __init__(self, code: Rejection, detail: str) -> None:
        self.code = code
        self.detail = detail
        super().__init__(f"{code.value}: {detail}")
