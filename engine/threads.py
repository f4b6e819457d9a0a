"""Chooses the number of CPU threads for a step: one, or all that the engine may use.

Threads that compute together wait for each other some forty times in a step. In a small step these waits take
longer than the threads save, and if another process uses the same core, each wait may last until that process
has had its time slice. The choice depends only on the step, so equal steps are computed alike.
"""

import torch

from engine.model import ModelConfig
from engine.operators import Operators

# Least work of a step with all threads, in multiplications: about 10 ms of one core. Smaller steps also gain
# from two free cores, but lose more on cores that other processes use: docs/performance.md.
LEAST_WORK = 250_000_000
# A step reads every weight once, however few tokens it has. One core takes as long for that as for this many
# tokens.
_READING_IN_TOKENS = 8


class StepThreads:
    """Sets the number of threads of PyTorch and of ``operators`` for each step. PyTorch's number belongs to
    the calling thread, so the thread that runs the steps must call ``take``.
    """

    def __init__(self, most: int, model: ModelConfig, operators: Operators) -> None:
        self._most, self._operators = most, operators
        self._parameters = model.num_parameters
        # Work per pair of query and key in all layers: query times key, and score times value.
        self._pair_size = 2 * model.num_layers * model.num_heads * model.head_dim

    def take(self, tokens: int, pairs: int) -> int:
        """Set and return the number of threads for a step with this many tokens and query-key pairs."""
        work = (tokens + _READING_IN_TOKENS) * self._parameters + pairs * self._pair_size
        threads = self._most if work >= LEAST_WORK else 1
        # Only one or all: OpenMP ends and restarts threads when a team shrinks, except to one thread. So this
        # call costs less than a microsecond.
        torch.set_num_threads(threads)
        self._operators.take_threads(all_of_them=threads > 1)
        return threads
