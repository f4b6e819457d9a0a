"""Renders chat templates of unknown cost in processes that are killed if they exceed their limits."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from budgeting.errors import TemplateRefused
from gateway.limited.process import LimitedError, LimitedProcess, OverLimit

WORK: Final = "budgeting.template:prepare_render"


def render_in(process: LimitedProcess, folder: Path) -> Callable[[bytes], bytes]:
    """Return a blocking function that renders in ``process``; it raises TemplateRefused with the limit."""
    limits = process.limits
    bounds = {
        "cpu_s": f"more than {limits.cpu_s:g} s of processor time",
        "memory_bytes": f"more than {limits.memory_bytes >> 20} MiB of memory",
        "answer_bytes": f"a text of more than {limits.answer_bytes >> 20} MiB",
    }

    def render(job: bytes) -> bytes:
        try:
            return process.run_blocking(job)
        except OverLimit as error:
            raise TemplateRefused(f"that of {folder.name} takes {bounds[error.bound]}") from error
        except LimitedError as error:
            raise TemplateRefused(f"that of {folder.name} could not be rendered: {error}") from error

    return render
