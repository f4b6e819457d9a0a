"""Importing torch and vLLM in a thread, without holding up the event loop next to it.

Two things would hold the interpreter's lock for long: loading torch's libraries (0.2 s, from a cold disk many
seconds), and the collector, which looks through an ever larger heap while thousands of modules are imported
(up to 0.36 s at a time). So the libraries are loaded by a foreign call, which releases the lock, before
anything imports them, and the garbage collector is paused meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# In the order of their needs; those that a build lacks are passed over. The first is global in torch too.
_LIBRARIES = (
    ("libtorch_global_deps.so", os.RTLD_NOW | os.RTLD_GLOBAL),
    ("libc10.so", os.RTLD_NOW),
    ("libtorch_cpu.so", os.RTLD_NOW),
    ("libc10_cuda.so", os.RTLD_NOW),
    ("libtorch_cuda.so", os.RTLD_NOW),
    ("libtorch.so", os.RTLD_NOW),
)
# Its initializers want the lock, so it is only read, which brings it into memory.
_READ = "libtorch_python.so"
_READ_BYTES = 1 << 22


def load_torch_libraries() -> None:
    """Load torch's shared libraries; a failure here is left to torch's own import to report."""
    if "torch" in sys.modules:
        return  # an engine before this one
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return
    folder = Path(spec.origin).parent / "lib"
    with contextlib.suppress(AttributeError, OSError):
        # ``ctypes.CDLL(path)`` would keep the lock while it loads; a call through it does not.
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
    """No collection while the block runs; what it has made is taken for lasting and not looked at again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
