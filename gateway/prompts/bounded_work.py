"""Renders chat templates and tokenizes large texts in processes that are killed over a limit."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from budgeting.errors import TemplateRefused
from gateway.errors import BackendUnavailable, InvalidRequest
from gateway.limited.process import LimitedError, LimitedProcess, Limits, OverLimit

RENDER: Final = "budgeting.template:prepare_render"
ENCODE: Final = "budgeting.vocabulary:prepare_encode"


def encode_limits(max_body_bytes: int) -> Limits:
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


def render_in(process: LimitedProcess, folder: Path) -> Callable[[bytes], bytes]:
    """Return a blocking function that renders in ``process``; it raises TemplateRefused with the limit."""

    def render(job: bytes) -> bytes:
        try:
            return process.run_blocking(job)
        except OverLimit as error:
            most = process.limits.described(error.bound)
            raise TemplateRefused(f"that of {folder.name} takes more than {most}") from error
        except LimitedError as error:
            raise TemplateRefused(f"that of {folder.name} could not be rendered: {error}") from error

    return render


def encode_in(process: LimitedProcess) -> Callable[[bytes], bytes]:
    """Return a blocking encoder in ``process``; it raises InvalidRequest over a limit, BackendUnavailable."""

    def encode(job: bytes) -> bytes:
        try:
            return process.run_blocking(job)
        except OverLimit as error:
            most = process.limits.described(error.bound, answer="tokens")
            raise InvalidRequest(
                f"a text of {len(job) - 1} bytes takes too much to tokenize; allowed: {most}"
            ) from error
        except LimitedError as error:
            raise BackendUnavailable(f"a large text could not be tokenized: {error}") from error

    return encode
