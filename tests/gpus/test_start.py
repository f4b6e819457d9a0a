"""`sluice serve --workers` stopped while it starts: no process and no file is left."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil

from tests.integration.live import gateway


def test_a_sigterm_during_the_start_leaves_no_worker_and_no_file(tmp_path: Path) -> None:
    files = tmp_path / "tmp"
    files.mkdir()
    with gateway(tmp_path, ready=False, words=("--workers", "2"), TMPDIR=str(files)) as live:
        front = psutil.Process(live.process.pid)
        begun = front.children(recursive=True)
        live.process.send_signal(signal.SIGTERM)
        while live.process.poll() is None:
            try:
                begun += [one for one in front.children(recursive=True) if one not in begun]
            except psutil.NoSuchProcess:
                break
            time.sleep(0.01)
        # The signal ended the start, or the gateway had started and drained.
        assert live.process.wait(60) in (128 + signal.SIGTERM, 0), live.log.read_text()
        assert "Traceback" not in live.log.read_text()
    left = psutil.wait_procs(begun, 120)[1]
    # Where process 1 reaps no children, an ended process stays a zombie.
    assert not [one for one in left if one.status() != psutil.STATUS_ZOMBIE]
    assert not list(files.glob("sluice-gpus-*"))
