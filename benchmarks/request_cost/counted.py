"""Runs a module with its calls counted: ``python -m benchmarks.request_cost.counted OUT MODULE ARGUMENTS``.

SIGUSR1 begins counting, SIGUSR2 ends it and writes the counts to OUT as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import uvloop

# What the event loop is asked for, by the method that takes it; call_at uses call_later. A thread is counted
# when work is handed to it and when its result comes back.
ASKED = {
    "call_later": "timers",
    "create_task": "tasks",
    "call_soon_threadsafe": "hand-overs",
    "run_in_executor": "hand-overs",
    "call_soon": "callbacks",
}


class Counts:
    """Calls of Python functions by code object, and what the loop was asked for."""

    def __init__(self) -> None:
        self.on = False
        self.calls: Counter[CodeType] = Counter()
        self.asked: Counter[str] = Counter()
        self._survivors = 0

    def profile(self, frame: FrameType, event: str, arg: Any) -> None:
        """The profile function of every thread."""
        if not self.on:
            return
        if event == "call" and frame.f_code.co_filename != __file__:
            self.calls[frame.f_code] += 1

    def loop(self) -> uvloop.Loop:
        """An event loop that counts what it is asked for."""

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
        """Count from here."""
        gc.collect()
        self._survivors = len(gc.get_objects())
        self.calls.clear()
        self.asked.clear()
        self.on = True

    def end(self, out: Path) -> None:
        """Write what was counted; a file that is there is whole."""
        self.on = False
        gc.collect()
        survivors = len(gc.get_objects()) - self._survivors
        calls = [[code.co_filename, code.co_qualname, count] for code, count in self.calls.items()]
        part = out.with_suffix(".part")
        part.write_text(json.dumps({"calls": calls, "asked": self.asked, "survivors": survivors}))
        part.rename(out)


def main() -> None:
    """Run the module under the counter."""
    out, module, *arguments = sys.argv[1:]
    counts = Counts()
    signal.signal(signal.SIGUSR1, counts.begin)
    signal.signal(signal.SIGUSR2, lambda *_: counts.end(Path(out)))
    threading.setprofile(counts.profile)
    sys.setprofile(counts.profile)
    uvloop.new_event_loop = counts.loop
    sys.argv = [module, *arguments]
    sys.path.insert(0, os.getcwd())
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
