"""Ctrl-C while modules are imported."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 128 + signal.SIGINT  # as a shell reports a command that Ctrl-C ended


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end the process at once during the block, which only imports: there is nothing to release.

    A KeyboardInterrupt would be printed with a traceback, or as another error: pydantic reports one as an
    invalid schema. A handler that is not Python's own stays, also that which ignores the signal.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
