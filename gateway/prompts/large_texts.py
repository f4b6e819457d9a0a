"""Tokenizes large texts in processes that are killed if they exceed their limits."""

from collections.abc import Callable
from typing import Final

from gateway.errors import BackendUnavailable, InvalidRequest
from gateway.limited.process import LimitedError, LimitedProcess, Limits, OverLimit

WORK: Final = "budgeting.vocabulary:prepare_encode"


def limits(max_body_bytes: int) -> Limits:
    """Return the limits for one text of at most ``max_body_bytes``.

    With tokens of usual length a byte of text takes 0.5 µs and about 100 bytes of memory; the answer has two
    numbers of 4 bytes per token. The limits allow for a token per byte, and for ten times the time.
    """
    cpu_s = 10.0 + max_body_bytes * 5e-6
    return Limits(
        cpu_s=cpu_s,
        wall_s=4 * cpu_s,
        memory_bytes=(256 << 20) + 256 * max_body_bytes,
        answer_bytes=8 * max_body_bytes,
    )


def encode_in(process: LimitedProcess) -> Callable[[bytes], bytes]:
    """Return a blocking encoder in ``process``; it raises InvalidRequest over a limit, BackendUnavailable."""
    bounds = {
        "cpu_s": f"{process.limits.cpu_s:g} s of processor time",
        "memory_bytes": f"{process.limits.memory_bytes >> 20} MiB of memory",
        "answer_bytes": f"{process.limits.answer_bytes >> 20} MiB of tokens",
    }

    def encode(job: bytes) -> bytes:
        try:
            return process.run_blocking(job)
        except OverLimit as error:
            raise InvalidRequest(
                f"a text of {len(job) - 1} bytes takes too much to tokenize; allowed: {bounds[error.bound]}"
            ) from error
        except LimitedError as error:
            raise BackendUnavailable(f"a large text could not be tokenized: {error}") from error

    return encode
