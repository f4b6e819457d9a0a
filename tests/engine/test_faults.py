"""Failures in a step: a bad row ends one request, a lack of memory ends none, any other error ends all."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.client import EngineClient, EngineTicket
from engine.engine import Engine
from engine.errors import EngineDead
from engine.memory import tells_of_no_memory
from engine.model import Decoder
from engine.runner import OutOfMemory
from engine.values import EngineConfig, GenerationRequest, SequenceEnd
from tests.engine.failing_child import FATAL_TOKEN
from tests.engine.support import (
    Answer,
    greedy,
    random_prompts,
    reference_greedy,
    run_prompts,
    run_to_end,
    write_tiny_model,
)

MakeEngine = Callable[..., Engine]
POISON = 77
HEALTHY = tuple(range(100, 140))


@pytest.fixture(scope="module")
def poisoned_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which the embedding of one token is not a number."""
    folder = write_tiny_model(tmp_path_factory.mktemp("poisoned"))
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON, 3] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


class ShortOfMemory:
    """The real model, in which a step of more than ``most`` tokens calls ``fail``. By default, ``fail`` asks
    the allocator for more memory than there is.
    """

    def __init__(self, model: Decoder, most: int, fail: Callable[[], object] | None = None) -> None:
        self._model = model
        self._most = -(-most // 16) * 16  # steps are padded to a multiple of 16 rows
        self._fail = fail or (lambda: torch.empty(1 << 60, dtype=torch.uint8))
        self.failures = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def forward(self, token_ids: torch.Tensor, *others: object) -> torch.Tensor:
        hidden: torch.Tensor = self._model.forward(token_ids, *others)  # type: ignore[arg-type]
        if len(token_ids) > self._most:
            self.failures += 1
            self._fail()
        return hidden


class FailingClient(EngineClient):
    """A client whose engine raises inside the step at a prompt with ``FATAL_TOKEN``."""

    child_module = "tests.engine.failing_child"


async def collect(ticket: EngineTicket) -> Answer:
    answer = Answer()
    with ticket:
        while answer.finish_reason is None:
            answer.take(await ticket.receive())
    return answer


def short_of_memory(engine: Engine, most: int, fail: Callable[[], object] | None = None) -> ShortOfMemory:
    model = ShortOfMemory(engine._runner._model, most, fail)  # type: ignore[attr-defined]
    engine._runner._model = model  # type: ignore[attr-defined]
    return model


async def test_a_nan_ends_its_request_with_its_own_code_and_the_engine_process_goes_on(
    tiny_model: Path, poisoned_model: Path
) -> None:
    prompts = random_prompts(8, 64)
    expected = reference_greedy(tiny_model, prompts, 12)
    client = EngineClient(EngineConfig(str(poisoned_model), num_threads=1, num_blocks=256))
    await client.start()
    try:
        bad = client.submit(GenerationRequest("bad", (*HEALTHY, POISON, *HEALTHY), greedy(12)))
        good = [
            client.submit(GenerationRequest(str(number), prompt, greedy(12)))
            for number, prompt in enumerate(prompts)
        ]
        answers = await asyncio.gather(*map(collect, (bad, *good)))
        assert answers[0].finish_reason is SequenceEnd.ERROR
        assert answers[0].last is not None
        assert (answers[0].last.error, answers[0].token_ids) == ("nan_output", [])
        assert [answer.token_ids for answer in answers[1:]] == expected
        assert client.state == "ready"
        assert client.signals is not None
        assert client.signals.kv_usage == 0
    finally:
        await client.stop()


@pytest.mark.parametrize("budget", [16, 512])
def test_a_block_with_a_nan_is_never_taken_from_the_prefix_cache(
    make_engine: MakeEngine, poisoned_model: Path, tiny_model: Path, budget: int
) -> None:
    engine = make_engine(poisoned_model, max_num_batched_tokens=budget)
    bad = (*HEALTHY, POISON, *HEALTHY)
    for _ in range(2):
        answer = run_to_end(engine, [GenerationRequest("bad", bad, greedy(4))])["bad"]
        assert answer.last is not None
        assert answer.last.error == "nan_output"
    # The blocks before the NaN token are valid and may be shared.
    healthy = (*HEALTHY, *HEALTHY)
    assert run_prompts(engine, [healthy], greedy(12)) == reference_greedy(tiny_model, [healthy], 12)


@pytest.mark.parametrize("most", [40, 100, 300])
def test_a_failed_allocation_in_a_step_preempts_sequences_and_changes_no_tokens(
    make_engine: MakeEngine, most: int
) -> None:
    prompts = random_prompts(12, 512, longest=most)
    expected = run_prompts(make_engine(), prompts, greedy(20))
    engine = make_engine()
    model = short_of_memory(engine, most)
    assert run_prompts(engine, prompts, greedy(20)) == expected
    assert model.failures > 0
    assert engine.signals.preemptions > 0


def test_a_request_for_which_there_is_no_memory_even_alone_ends_alone(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=512)
    short_of_memory(engine, 50)
    answers = run_to_end(
        engine,
        [GenerationRequest("big", HEALTHY * 2, greedy(4)), GenerationRequest("small", HEALTHY, greedy(4))],
    )
    assert answers["big"].last is not None
    assert (answers["big"].finish_reason, answers["big"].last.error) == (SequenceEnd.ERROR, "out_of_memory")
    assert len(answers["small"].token_ids) == 4


def say(message: str) -> Callable[[], object]:
    def fail() -> object:
        raise RuntimeError(message)

    return fail


def test_onednn_without_memory_is_short_of_memory_too(make_engine: MakeEngine) -> None:
    engine = make_engine()
    model = short_of_memory(engine, 100, say("could not create a primitive"))
    answers = run_prompts(engine, random_prompts(6, 512, longest=100), greedy(4, ignore_eos=True))
    assert [len(answer) for answer in answers] == [4] * 6
    assert model.failures > 0


def test_an_error_that_is_not_about_memory_is_raised_unchanged(make_engine: MakeEngine) -> None:
    engine = make_engine()
    short_of_memory(engine, 0, say("a kernel failed"))
    engine.add(GenerationRequest("a", HEALTHY, greedy(4)))
    with pytest.raises(RuntimeError, match="a kernel failed") as caught:
        engine.step()
    assert not isinstance(caught.value, OutOfMemory)


async def test_an_exception_inside_the_step_ends_all_requests_with_one_error_and_the_engine_says_it_is_dead(
    tiny_model: Path,
) -> None:
    deaths: list[EngineDead] = []
    client = FailingClient(EngineConfig(str(tiny_model), num_threads=1), on_death=deaths.append)
    await client.start()
    tickets = [
        client.submit(GenerationRequest(str(number), HEALTHY, greedy(900, ignore_eos=True)))
        for number in range(4)
    ]
    await tickets[0].receive()
    tickets.append(client.submit(GenerationRequest("fatal", (5, FATAL_TOKEN), greedy(4))))

    async def end_of(ticket: EngineTicket) -> str:
        with pytest.raises(EngineDead) as caught:
            while True:
                await ticket.receive()
        return str(caught.value)

    async with asyncio.timeout(60):
        messages: Sequence[str] = await asyncio.gather(*map(end_of, tickets))
    assert set(messages) == {"the engine failed: IndexError: a step went wrong"}
    assert client.state == "dead"
    assert [str(death) for death in deaths] == [messages[0]]
    with pytest.raises(EngineDead, match="a step went wrong"):
        client.submit(GenerationRequest("late", HEALTHY, greedy(4)))
    await client.stop()
    assert client.state == "dead"


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."), True),
        (MemoryError(), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
    ids=str,
)
def test_errors_of_cudas_libraries_that_tell_of_no_memory_are_told_from_others(
    error: Exception, is_memory: bool
) -> None:
    assert tells_of_no_memory(error) is is_memory
