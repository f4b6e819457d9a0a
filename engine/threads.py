"""How many of the CPU's threads a step takes: one, or all that the engine may have.

Threads that compute together wait for each other some forty times in a step. In a small step that takes
longer than what they save, and on a core that another process uses as well each of these waits may last until
that process has had its turn. The choice depends on nothing but the step, so equal steps are computed alike.
"""

import torch

from engine.model import ModelConfig
from engine.operators import Operators

# What a step must have to do before it takes all threads, in products of two numbers: about 10 ms of a core.
# Smaller steps gain from two free cores too, but lose more on cores that others use: docs/performance.md.
LEAST_WORK = 250_000_000
# A step reads every weight once, however few its tokens. That takes one core as long as this many tokens do.
_READING_IN_TOKENS = 8


class StepThreads:
    """Sets the threads of PyTorch and of ``operators`` for each step. PyTorch's number is one of the thread
    that calls: that which runs the steps.
    """

    def __init__(self, most: int, model: ModelConfig, operators: Operators) -> None:
        self._most, self._operators = most, operators
        self._parameters = model.num_parameters
        # For a pair of a query and a key: their product, and the value's with the score, in all layers.
        self._pair_size = 2 * model.num_layers * model.num_heads * model.head_dim

    def take(self, tokens: int, pairs: int) -> int:
        """Prepare a step of so many tokens, which has so many pairs of a query and a key; returns the threads
        it will have.
        """
        threads = self._most if self._work(tokens, pairs) >= LEAST_WORK else 1
        # Not a number between: OpenMP ends threads when a team gets smaller, unless to one, and starts them
        # again. So this costs less than a microsecond.
        torch.set_num_threads(threads)
        self._operators.take_threads(all_of_them=threads > 1)
        return threads

    def _work(self, tokens: int, pairs: int) -> int:
        return (tokens + _READING_IN_TOKENS) * self._parameters + pairs * self._pair_size
