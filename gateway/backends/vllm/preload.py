"""Helps to import torch and vLLM in a thread without blocking the event loop.

Two things would hold the GIL for long: loading torch's libraries (0.2 s, from a cold disk many seconds) and
the garbage collector, which scans a growing heap (up to 0.36 s at a time). So a foreign call, which releases
the GIL, loads the libraries before the import, and the collector is paused.
"""

import contextlib
import ctypes
import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# In the order of their dependencies; missing ones are skipped. Torch also loads the first with RTLD_GLOBAL.
_LIBRARIES = (
    ("libtorch_global_deps.so", os.RTLD_NOW | os.RTLD_GLOBAL),
    ("libc10.so", os.RTLD_NOW),
    ("libtorch_cpu.so", os.RTLD_NOW),
    ("libc10_cuda.so", os.RTLD_NOW),
    ("libtorch_cuda.so", os.RTLD_NOW),
    ("libtorch.so", os.RTLD_NOW),
)
# The initializers of this library need the GIL, so it is only read into the page cache.
_READ = "libtorch_python.so"
_READ_BYTES = 1 << 22


def load_torch_libraries() -> None:
    """Load torch's shared libraries; torch's own import reports a failure."""
    if "torch" in sys.modules:
        return  # already imported for an earlier engine
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return
    folder = Path(spec.origin).parent / "lib"
    with contextlib.suppress(AttributeError, OSError):
        # ``ctypes.CDLL(path)`` would hold the GIL while it loads; a call through it does not.
        dlopen = ctypes.CDLL(None).dlopen
        dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
        for name, mode in _LIBRARIES:
            if (folder / name).is_file():
                dlopen(os.fsencode(folder / name), mode)
        with (folder / _READ).open("rb", buffering=0) as file:
            while file.read(_READ_BYTES):
                continue


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Pause garbage collection while the block runs; then freeze all objects as permanent."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
