"""Runs a module with its calls counted: ``python -m benchmarks.request_cost.counted OUT MODULE ARGUMENTS``.

With SLUICE_COUNT=collections it counts garbage collections alone, so that they take their usual time.

SIGUSR1 starts counting; SIGUSR2 ends it and writes the counts to OUT as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import uvloop

# The kinds of calls of the event loop, by their methods; call_at uses call_later. A thread is counted when
# work is handed to it and when its result comes back.
ASKED = {
    "call_later": "timers",
    "create_task": "tasks",
    "call_soon_threadsafe": "hand-overs",
    "run_in_executor": "hand-overs",
    "call_soon": "callbacks",
}


# Functions of Python's library are counted by their callers too.
LIBRARY = str(Path(os.__file__).parent)


def _name(code: CodeType, made: type | None, caller: CodeType | None) -> tuple[str, str]:
    """Return the file and the name of a function; a generated one belongs to the file of its class."""
    if made is not None:
        module = sys.modules.get(made.__module__)
        return getattr(module, "__file__", None) or code.co_filename, f"{made.__qualname__}.{code.co_name}"
    by = "" if caller is None else f" by {Path(caller.co_filename).stem}.{caller.co_qualname}"
    return code.co_filename, code.co_qualname + by


class Counts:
    """Calls of Python functions by code object, and calls of the event loop's counted methods."""

    def __init__(self) -> None:
        self.on = False
        self.calls: Counter[tuple[CodeType, type | None, CodeType | None]] = Counter()
        self.asked: Counter[str] = Counter()
        self.collections: list[tuple[int, float, int]] = []
        self._collecting_since = 0.0
        self._survivors = 0

    def collected(self, phase: str, info: dict[str, int]) -> None:
        """Record each garbage collection: generation, CPU seconds and objects found; a callback of ``gc``."""
        if phase == "start":
            self._collecting_since = time.thread_time()
        elif self.on:
            took_s = time.thread_time() - self._collecting_since
            self.collections.append((info["generation"], took_s, info["collected"]))

    def profile(self, frame: FrameType, event: str, arg: Any) -> None:
        """Count a call; the profile function of every thread."""
        if not self.on:
            return
        if event == "call" and frame.f_code.co_filename != __file__:
            code = frame.f_code
            made: type | None = None
            if code.co_filename == "<string>" and "self" in code.co_varnames:
                made = type(frame.f_locals["self"])
            caller = frame.f_back.f_code if frame.f_back and LIBRARY in code.co_filename else None
            self.calls[code, made, caller] += 1

    def loop(self) -> uvloop.Loop:
        """Return an event loop that counts the calls of its counted methods."""

        def counting(method: str, kind: str) -> Any:
            plain = getattr(uvloop.Loop, method)

            def ask(loop: uvloop.Loop, *args: Any, **more: Any) -> Any:
                if self.on:
                    self.asked[kind] += 1
                return plain(loop, *args, **more)

            return ask

        methods = {method: counting(method, kind) for method, kind in ASKED.items()}
        loop: uvloop.Loop = type("CountingLoop", (uvloop.Loop,), methods)()
        return loop

    def begin(self, *_: object) -> None:
        """Start counting."""
        gc.collect()
        self._survivors = len(gc.get_objects())
        self.calls.clear()
        self.asked.clear()
        self.collections.clear()
        self.on = True

    def end(self, out: Path) -> None:
        """Write the counts; the file appears only once it is complete."""
        self.on = False
        gc.collect()
        survivors = len(gc.get_objects()) - self._survivors
        calls = [[*_name(*called), count] for called, count in self.calls.items()]
        part = out.with_suffix(".part")
        counts = {
            "calls": calls,
            "asked": self.asked,
            "survivors": survivors,
            "collections": self.collections,
        }
        part.write_text(json.dumps(counts))
        part.rename(out)


def main() -> None:
    """Run the module under the counter."""
    out, module, *arguments = sys.argv[1:]
    counts = Counts()
    signal.signal(signal.SIGUSR1, counts.begin)
    signal.signal(signal.SIGUSR2, lambda *_: counts.end(Path(out)))
    if os.environ.get("SLUICE_COUNT") == "collections":
        gc.callbacks.append(counts.collected)
    else:
        threading.setprofile(counts.profile)
        sys.setprofile(counts.profile)
        uvloop.new_event_loop = counts.loop
    sys.argv = [module, *arguments]
    sys.path.insert(0, os.getcwd())
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
