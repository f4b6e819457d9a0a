"""Whether a process of an engine runs, also while it ends."""

import subprocess
import sys

import psutil

from gateway.backends.host import gone_and_stopped


def test_a_process_that_ends_while_it_is_looked_at_does_not_run() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        process = psutil.Process(started.pid)
        assert gone_and_stopped([process]) == (False, False)
        started.kill()
        psutil.wait_procs([process], timeout=10)
        assert gone_and_stopped([process]) == (True, False), "ended, and reaped or not"
        started.wait()
        assert gone_and_stopped([process]) == (True, False), "there is no such process any more"
