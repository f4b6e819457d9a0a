"""Faults inside vLLM's worker, for tests: ``worker_extension_cls`` mixes them into the worker's class."""

import resource
import time
from pathlib import Path
from typing import Any

HEADROOM = 256 << 20
PIECE = 32 << 20


class Faults:
    """Methods that arm a fault, which takes effect in the worker's next step, not in the call itself."""

    execute_model: Any

    def hang_in_the_next_step(self) -> None:
        self.execute_model = lambda *args, **kwargs: time.sleep(3600)

    def run_out_of_memory_in_the_next_step(self) -> None:
        """Limits the address space to little more than is in use; then PyTorch asks for more."""

        def execute_model(*args: Any, **kwargs: Any) -> None:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + HEADROOM, resource.RLIM_INFINITY))
            _allocate()

        self.execute_model = execute_model

    def be_killed_for_memory_in_the_next_step(self, group: str) -> None:
        """Moves the process to a control group with less memory than it takes, so that the kernel kills it."""

        def execute_model(*args: Any, **kwargs: Any) -> None:
            Path(group, "cgroup.procs").write_text("0")
            _allocate()

        self.execute_model = execute_model


def _allocate() -> None:
    import torch

    held = []
    while True:
        held.append(torch.ones(PIECE, dtype=torch.uint8))
