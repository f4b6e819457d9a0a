"""An engine process whose loop hangs while the file ``HANG_FILE`` exists; for the supervisor's tests."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from engine import process
from engine.engine import Engine
from engine.runner import Runner, StepResult
from engine.scheduler import Chunk
from engine.wire import Command


class HangingRunner:
    """Passes each step to ``runner``, but hangs while the file ``mark`` exists."""

    def __init__(self, runner: Runner, mark: Path) -> None:
        self._runner, self._mark = runner, mark

    def run(self, chunks: Sequence[Chunk]) -> StepResult:
        while self._mark.exists():
            time.sleep(3600)
        return self._runner.run(chunks)


def load(command: Command) -> Engine:
    engine = process._load(command)
    engine._runner = HangingRunner(engine._runner, Path(os.environ["HANG_FILE"]))
    return engine


if __name__ == "__main__":
    sys.exit(process.main(sys.argv[1:], load))
