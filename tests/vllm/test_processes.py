"""Whether a process of vLLM runs, also while it ends."""

import subprocess
import sys

import psutil

from gateway.backends.vllm.processes import runs


def test_a_process_that_ends_while_it_is_looked_at_does_not_run() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        process = psutil.Process(started.pid)
        assert runs(process)
        started.kill()
        psutil.wait_procs([process], timeout=10)
        assert not runs(process), "ended, and reaped or not"
        started.wait()
        assert not runs(process), "there is no such process any more"
