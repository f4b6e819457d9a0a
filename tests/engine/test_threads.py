"""The work of a step decides how many threads it uses; the tokens do not depend on that number."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from engine.kernels import CompiledOperators
from engine.loader import read_config
from engine.operators import Operators
from engine.threads import LEAST_WORK, StepThreads
from tests.engine.support import DEMO_MODEL, greedy, random_prompts, run_prompts

DEMO = read_config(DEMO_MODEL)
SHAPE = (4, 2, 8)


class RecordingOperators(Operators):
    """Operators that record the calls of ``take_threads``."""

    def __init__(self) -> None:
        super().__init__(*SHAPE, 1e-5)
        self.calls: list[bool] = []

    def take_threads(self, *, all_of_them: bool) -> None:
        """See ``Operators``."""
        self.calls.append(all_of_them)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """Restores PyTorch's number of threads after the test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_small_step_takes_one_thread_and_a_large_one_all() -> None:
    operators = RecordingOperators()
    threads = StepThreads(2, DEMO, operators)
    enough = -(-LEAST_WORK // DEMO.num_parameters)
    for tokens, expected in ((1, 1), (enough, 2), (1024, 2), (1, 1)):
        assert threads.take(tokens, pairs=tokens) == expected
        assert torch.get_num_threads() == expected
    assert operators.calls == [False, True, True, False]


def test_many_keys_make_a_step_of_one_token_large() -> None:
    threads = StepThreads(2, DEMO, RecordingOperators())
    assert threads.take(1, pairs=100) == 1
    assert threads.take(1, pairs=100_000) == 2


def test_an_engine_of_one_thread_takes_one_for_any_step() -> None:
    operators = RecordingOperators()
    assert StepThreads(1, DEMO, operators).take(10_000, pairs=10_000_000) == 1
    assert operators.calls == [False]


def test_the_tokens_are_the_same_with_one_thread_and_with_two(make_engine: Callable[..., Engine]) -> None:
    prompts = random_prompts(6, 4096)
    options: dict[str, object] = {"folder": DEMO_MODEL, "max_num_seqs": 16, "max_num_batched_tokens": 200}
    alone = run_prompts(make_engine(num_threads=1, **options), prompts, greedy(4))
    assert run_prompts(make_engine(num_threads=2, **options), prompts, greedy(4)) == alone


def test_two_engines_in_a_process_take_their_own_threads_in_turn(make_engine: Callable[..., Engine]) -> None:
    prompt = [tuple(range(3, 203))]
    one, two = (make_engine(folder=DEMO_MODEL, num_threads=count) for count in (1, 2))
    for model, expected in ((one, 1), (two, 2), (one, 1)):
        run_prompts(model, prompt, greedy(1))
        assert torch.get_num_threads() == expected


def test_loops_of_two_threads_keep_pytorchs_thread_count_and_allow_no_nested_region() -> None:
    torch.set_num_threads(1)
    # The shape of the demo model: the loops that other tests have compiled are found on disk.
    shape = (DEMO.num_heads, DEMO.num_kv_heads, DEMO.head_dim)
    CompiledOperators(*shape, 1e-5, block_size=16, threads=2).compile_parallel()
    assert torch.get_num_threads() == 1
    assert ctypes.CDLL(None).omp_get_max_active_levels() == 1


def test_serial_loops_are_never_loaded_from_disk_as_parallel_ones(tmp_path: Path) -> None:
    script = (
        "import numpy as np\n"
        "from engine.kernels import compile_loops\n"
        "for parallel in (False, True, False, True):\n"
        "    gate = compile_loops(4, 2, 8, 4, parallel=parallel).gate\n"
        "    gate(np.zeros((1, 4), np.float32), np.zeros((1, 2), np.float32))\n"
        "    print(gate.stats.cache_hits.total())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["0", "0", "1", "1"]
