"""Adapters of a running engine process: loaded, replaced and removed while requests run."""

import asyncio
import resource
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from engine.client import EngineClient
from engine.errors import (
    AdapterMismatch,
    AdapterNotFound,
    AdapterNotLoaded,
    EngineDead,
    NoAdapterRoom,
    RequestedAdapterMissing,
)
from engine.values import EngineConfig, EngineSignals, GenerationRequest, SequenceEnd
from tests.engine.adapters import peft_greedy, write_adapter
from tests.engine.support import DEMO_MODEL, greedy, random_prompts, reference_greedy

PROMPT = (10, 20, 30, 40, 50)


@pytest.fixture(scope="module")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(folder / name, tiny_model, seed=n) for n, name in enumerate("abc")}


@asynccontextmanager
async def running(folder: Path, **options: object) -> AsyncIterator[EngineClient]:
    settings: dict[str, object] = {"num_threads": 1, "num_blocks": 512, **options}
    client = EngineClient(EngineConfig(str(folder), **settings))  # type: ignore[arg-type]
    await client.start()
    try:
        yield client
    finally:
        await client.stop()


async def generate(
    client: EngineClient,
    name: str,
    adapter_id: str | None,
    prompt: tuple[int, ...] = PROMPT,
    tokens: int = 16,
) -> list[int]:
    found: list[int] = []
    with client.submit(GenerationRequest(name, prompt, greedy(tokens), adapter_id=adapter_id)) as ticket:
        while True:
            output = await ticket.receive()
            assert output.finish_reason is not SequenceEnd.ERROR, output.error
            found += output.token_ids
            if output.finish_reason is not None:
                return found


async def test_an_adapter_is_loaded_used_and_unloaded(tiny_model: Path, adapters: dict[str, Path]) -> None:
    async with running(tiny_model) as client:
        with pytest.raises(RequestedAdapterMissing, match="adapter 'a' is not loaded"):
            client.submit(GenerationRequest("x", PROMPT, greedy(1), adapter_id="a"))
        await client.load_adapter("a", str(adapters["a"]))
        assert client.adapters == {"a": str(adapters["a"])}
        assert await generate(client, "x", "a") == peft_greedy(tiny_model, adapters["a"], [PROMPT], 16)[0]
        await client.unload_adapter("a")
        assert not client.adapters
        with pytest.raises(RequestedAdapterMissing):
            client.submit(GenerationRequest("x", PROMPT, greedy(1), adapter_id="a"))
        with pytest.raises(AdapterNotLoaded):
            await client.unload_adapter("a")
        assert await generate(client, "x", None) == reference_greedy(tiny_model, [PROMPT], 16)[0]


async def test_a_load_that_fails_says_why_and_changes_nothing(
    tiny_model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    async with running(tiny_model, max_loras=1) as client:
        await client.load_adapter("a", str(adapters["a"]))
        with pytest.raises(AdapterNotFound, match=r"^adapter folder .*nowhere does not exist$"):
            await client.load_adapter("a", str(tmp_path / "nowhere"))
        with pytest.raises(AdapterMismatch):
            await client.load_adapter("a", str(write_adapter(tmp_path / "demo", DEMO_MODEL, seed=1)))
        with pytest.raises(NoAdapterRoom):
            await client.load_adapter("b", str(adapters["b"]))
        assert client.adapters == {"a": str(adapters["a"])}
        assert await generate(client, "x", "a") == peft_greedy(tiny_model, adapters["a"], [PROMPT], 16)[0]


async def test_adding_replacing_and_removing_under_load_fails_no_request(
    tiny_model: Path, adapters: dict[str, Path]
) -> None:
    prompts = random_prompts(4, 512, longest=40)
    expected = {name: peft_greedy(tiny_model, folder, prompts, 16) for name, folder in adapters.items()}
    expected["base"] = reference_greedy(tiny_model, prompts, 16)
    done = asyncio.Event()
    answered = dict.fromkeys(("kept", "swapped", "base"), 0)

    async with running(tiny_model, max_loras=3) as client:
        await client.load_adapter("kept", str(adapters["c"]))
        await client.load_adapter("swapped", str(adapters["a"]))

        async def keep_asking(caller: int, name: str, allowed: str) -> None:
            turn = 0
            while not done.is_set():
                n = turn % len(prompts)
                adapter_id = None if name == "base" else name
                tokens = await generate(client, f"{caller} {turn}", adapter_id, prompts[n])
                assert tokens in [expected[one][n] for one in allowed.split()]
                answered[name] += 1
                turn += 1

        async with asyncio.TaskGroup() as tasks:
            for caller in range(4):
                tasks.create_task(keep_asking(3 * caller, "kept", "c"))
                tasks.create_task(keep_asking(3 * caller + 1, "swapped", "a b"))
                tasks.create_task(keep_asking(3 * caller + 2, "base", "base"))
            for turn in range(10):
                await client.load_adapter("swapped", str(adapters["ba"[turn % 2]]))
                await client.load_adapter("passing", str(adapters["c"]))
                await asyncio.sleep(0.05)
                await client.unload_adapter("passing")
            done.set()
    assert min(answered.values()) > 10


async def test_commands_take_effect_in_the_order_in_which_they_were_given(
    tiny_model: Path, adapters: dict[str, Path]
) -> None:
    async with running(tiny_model) as client, asyncio.TaskGroup() as tasks:
        for name in "abc":
            tasks.create_task(client.load_adapter("x", str(adapters[name])))
        tasks.create_task(client.unload_adapter("x"))
        last = tasks.create_task(client.load_adapter("x", str(adapters["b"])))
        await last
        assert client.adapters == {"x": str(adapters["b"])}
        assert await generate(client, "1", "x") == peft_greedy(tiny_model, adapters["b"], [PROMPT], 16)[0]


async def test_a_large_adapter_does_not_hold_up_the_requests_that_run(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, DEMO_MODEL, seed=1, rank=256)
    steps: list[EngineSignals] = []
    arrived: list[float] = []

    def note(signals: EngineSignals) -> None:
        steps.append(signals)
        arrived.append(time.perf_counter())

    client = EngineClient(
        EngineConfig(str(DEMO_MODEL), num_threads=1, num_blocks=512, max_lora_rank=256), on_signals=note
    )
    await client.start()
    try:
        sampling = greedy(300, ignore_eos=True)
        with client.submit(GenerationRequest("x", PROMPT, sampling)) as ticket:
            await ticket.receive()
            before = len(steps)
            await client.load_adapter("big", str(folder))
            gaps = [b - a for a, b in zip(arrived[before - 1 :], arrived[before:], strict=False)]
            print(f"{len(gaps)} steps meanwhile, at most {max(gaps):.3f} s apart")
            assert len(gaps) >= 4, "held up, they would wait for one step after the load"
    finally:
        await client.stop()


async def test_an_adapter_for_which_there_is_no_memory_is_refused_and_the_engine_continues(
    tmp_path: Path,
) -> None:
    small = str(write_adapter(tmp_path / "small", DEMO_MODEL, seed=1))
    large = str(write_adapter(tmp_path / "large", DEMO_MODEL, seed=2, rank=256))
    async with running(DEMO_MODEL, max_lora_rank=256) as client:
        await client.load_adapter("small", small)
        expected = await generate(client, "before", "small")
        assert client.pid is not None
        used = psutil.Process(client.pid).memory_info().vms
        for room in (1 << 20, 40 << 20):  # too little to map the file; to copy it
            before = resource.prlimit(client.pid, resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))
            with pytest.raises(NoAdapterRoom, match="no memory"):
                await client.load_adapter("large", large)
            resource.prlimit(client.pid, resource.RLIMIT_AS, before)
            assert await generate(client, f"after {room}", "small") == expected
        await client.load_adapter("large", large)


async def test_a_cancelled_load_goes_on_and_is_seen_when_it_is_done(
    tiny_model: Path, adapters: dict[str, Path]
) -> None:
    async with running(tiny_model) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await client.load_adapter("a", str(adapters["a"]))
        await client.load_adapter("b", str(adapters["b"]))
        assert set(client.adapters) == {"a", "b"}


async def test_loading_into_an_engine_that_is_not_running_fails(
    tiny_model: Path, adapters: dict[str, Path]
) -> None:
    client = EngineClient(EngineConfig(str(tiny_model), num_threads=1))
    with pytest.raises(EngineDead):
        await client.load_adapter("a", str(adapters["a"]))
    await client.start()
    loading, _ = await asyncio.gather(
        client.load_adapter("a", str(adapters["a"])), client.stop(), return_exceptions=True
    )
    assert isinstance(loading, EngineDead)
    assert not client.adapters
