"""An engine process whose step fails: ``python -m tests.engine.failing_child FD``, for the client's tests.

Everything is the real engine except the runner, which raises at a prompt that contains ``FATAL_TOKEN``.
"""

import sys
from collections.abc import Sequence

from engine import process
from engine.engine import Engine
from engine.runner import Runner, StepResult
from engine.scheduler import Chunk
from engine.wire import Command

FATAL_TOKEN = 99


class FailingRunner:
    """Passes each step to ``runner``; raises IndexError when a prompt contains ``FATAL_TOKEN``."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def run(self, chunks: Sequence[Chunk]) -> StepResult:
        if any(FATAL_TOKEN in chunk.sequence.request.prompt_token_ids for chunk in chunks):
            raise IndexError("a step went wrong")
        return self._runner.run(chunks)


def load(command: Command) -> Engine:
    engine = process._load(command)
    engine._runner = FailingRunner(engine._runner)
    return engine


if __name__ == "__main__":
    sys.exit(process.main(sys.argv[1:], load))
