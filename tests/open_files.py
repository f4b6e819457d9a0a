"""A process with so many open files that further ones have numbers that ``select`` does not take."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

_FD_SETSIZE = 1024


@contextmanager
def many_open_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * _FD_SETSIZE), hard))
    opened: list[int] = []
    try:
        while not opened or opened[-1] < _FD_SETSIZE:
            opened.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for one in opened:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
