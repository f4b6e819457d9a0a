"""The client with a real engine process: start, streams, aborts, death."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
import uvloop

from engine.client import EngineClient, receive_any
from engine.engine import Engine
from engine.errors import (
    DuplicateSequence,
    EngineBusy,
    EngineDead,
    EngineKilled,
    EngineStartError,
    ModelNotFound,
    PromptTooLong,
    UnknownToken,
)
from engine.values import (
    EngineConfig,
    EngineSignals,
    GenerationRequest,
    GrammarKind,
    SamplingParams,
    SequenceEnd,
    StructuredOutput,
)
from tests.engine.support import REPOSITORY, Answer, greedy, random_prompts, run_prompts
from tests.fork_server import ForkedPopen
from tests.open_files import many_open_files

PROMPT = (10, 20, 30, 40, 50)


@asynccontextmanager
async def running(folder: Path, **options: object) -> AsyncIterator[EngineClient]:
    settings: dict[str, object] = {"num_threads": 1, "num_blocks": 512, **options}
    client = EngineClient(EngineConfig(str(folder), **settings))  # type: ignore[arg-type]
    await client.start()
    try:
        yield client
    finally:
        await client.stop()


# Tests that only send requests share one engine process: its start takes longer than most of the tests.
shared = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tiny_model: Path) -> AsyncIterator[EngineClient]:
    """The client of a running engine; a test must leave no request on it."""
    async with running(tiny_model) as client:
        yield client


async def collect(client: EngineClient, request: GenerationRequest) -> Answer:
    answer = Answer()
    with client.submit(request) as ticket:
        while answer.finish_reason is None:
            answer.take(await ticket.receive())
    return answer


async def gather(work: Iterable[Coroutine[None, None, Answer]]) -> list[Answer]:
    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(one) for one in work]
    return [task.result() for task in started]


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - some conditions are about another process
            await asyncio.sleep(0.005)


def is_running(pid: int) -> bool:
    state = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True
    ).stdout.strip()
    return bool(state) and not state.startswith("Z")


async def test_start_reports_what_was_loaded_and_stop_ends_the_process(tiny_model: Path) -> None:
    client = EngineClient(EngineConfig(str(tiny_model), num_threads=1))
    assert client.state == "new"
    with pytest.raises(EngineDead):
        client.submit(GenerationRequest("early", PROMPT, greedy(1)))
    info = await client.start()
    assert client.state == "ready"
    assert (info.vocab_size, info.max_model_len, info.eos_token_ids, info.dtype) == (
        512,
        1024,
        (1,),
        "float32",
    )
    pid = client.pid
    assert pid is not None
    assert is_running(pid)
    await client.stop()
    assert client.state == "stopped"
    assert not is_running(pid)
    with pytest.raises(EngineDead):
        client.submit(GenerationRequest("late", PROMPT, greedy(1)))


@shared
async def test_32_streams_give_the_tokens_of_the_engine_and_the_loop_stays_responsive(
    client: EngineClient, make_engine: Callable[..., Engine]
) -> None:
    prompts = random_prompts(32, 512, longest=100)
    sampling = greedy(150, ignore_eos=True)
    expected = run_prompts(make_engine(), prompts, sampling)
    lags: list[float] = []
    held: list[float] = []  # CPU seconds of this thread, which a busy machine does not lengthen
    done = asyncio.Event()

    async def measure() -> None:
        while not done.is_set():
            before, worked = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0.002)
            lags.append(time.perf_counter() - before - 0.002)
            held.append(time.thread_time() - worked)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(measure())
        answers = await gather(
            collect(client, GenerationRequest(str(n), prompt, sampling)) for n, prompt in enumerate(prompts)
        )
        done.set()
    assert [answer.token_ids for answer in answers] == expected
    assert sorted(held)[int(len(held) * 0.99)] < 0.2, "some milliseconds"
    assert sorted(lags)[len(lags) // 2] < 0.5, "some milliseconds on a machine that does nothing else"


async def test_an_engine_started_by_a_gateway_with_many_connections_generates(tiny_model: Path) -> None:
    with many_open_files():
        async with running(tiny_model) as client:
            answer = await collect(client, GenerationRequest("a", PROMPT, greedy(4, ignore_eos=True)))
            assert len(answer.token_ids) == 4


@shared
async def test_leaving_a_ticket_frees_its_blocks_while_others_go_on(client: EngineClient) -> None:
    other = client.submit(GenerationRequest("other", PROMPT, greedy(900, ignore_eos=True)))
    with client.submit(GenerationRequest("left", PROMPT * 40, greedy(900, ignore_eos=True))) as ticket:
        await ticket.receive()
        assert client.signals is not None
        assert client.signals.running == 2
        used = client.signals.kv_usage
        assert used > 13 / client.signals.total_blocks
    await until(lambda: client.signals is not None and client.signals.running == 1)
    assert client.signals.kv_usage < used
    other.abort()
    await until(lambda: client.signals is not None and client.signals.kv_usage == 0)


@shared
async def test_a_cancelled_receiver_aborts_its_request(client: EngineClient) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await collect(client, GenerationRequest("a", PROMPT, greedy(1000, ignore_eos=True)))
    await until(lambda: client.signals is not None and client.signals.kv_usage == 0)


@shared
async def test_an_id_can_be_used_again_right_after_an_abort_and_gets_only_its_own_output(
    client: EngineClient,
) -> None:
    expected = await collect(client, GenerationRequest("a", PROMPT, greedy(30, ignore_eos=True)))
    for _ in range(10):
        with client.submit(GenerationRequest("a", (60, 70), greedy(500, ignore_eos=True))) as ticket:
            await ticket.receive()
        again = await collect(client, GenerationRequest("a", PROMPT, greedy(30, ignore_eos=True)))
        assert again.token_ids == expected.token_ids
        assert again.last is not None
        assert again.last.request_id == "a"


@shared
async def test_a_slow_receiver_gets_everything_in_one_output(client: EngineClient) -> None:
    quick = await collect(client, GenerationRequest("a", PROMPT, greedy(40, ignore_eos=True)))
    assert client.signals is not None
    before = client.signals.steps
    with client.submit(GenerationRequest("a", PROMPT, greedy(40, ignore_eos=True))) as ticket:
        await until(
            lambda: (
                client.signals is not None
                and client.signals.steps >= before + 40
                and not client.signals.running
            )
        )
        output = await ticket.receive()
    assert list(output.token_ids) == quick.token_ids
    assert output.text == quick.text
    assert output.finish_reason is SequenceEnd.LENGTH
    assert output.queue_wait_s is not None


async def test_requests_that_cannot_run_are_refused_when_submitted(tiny_model: Path) -> None:
    async with running(tiny_model, max_num_seqs=2, max_waiting=1) as client:
        with pytest.raises(PromptTooLong):
            client.submit(GenerationRequest("long", (5,) * 1024, greedy(1)))
        with pytest.raises(UnknownToken):
            client.submit(GenerationRequest("odd", (512,), greedy(1)))
        tickets = [
            client.submit(GenerationRequest(name, PROMPT, greedy(500, ignore_eos=True))) for name in "abc"
        ]
        with pytest.raises(DuplicateSequence):
            client.submit(GenerationRequest("a", PROMPT, greedy(1)))
        with pytest.raises(EngineBusy):
            client.submit(GenerationRequest("d", PROMPT, greedy(1)))
        for ticket in tickets:
            ticket.abort()
        answer = await collect(client, GenerationRequest("d", PROMPT, greedy(2, ignore_eos=True)))
        assert len(answer.token_ids) == 2


async def test_a_killed_engine_fails_all_tickets_at_once(tiny_model: Path) -> None:
    deaths: list[EngineDead] = []
    client = EngineClient(EngineConfig(str(tiny_model), num_threads=1), on_death=deaths.append)
    await client.start()
    tickets = [
        client.submit(GenerationRequest(str(n), PROMPT, greedy(1000, ignore_eos=True))) for n in range(8)
    ]
    await tickets[0].receive()
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    async with asyncio.timeout(60.0):
        for ticket in tickets:
            with pytest.raises(EngineDead):
                while True:
                    await ticket.receive()
    assert client.state == "dead"
    assert len(deaths) == 1
    with pytest.raises(EngineDead):
        client.submit(GenerationRequest("late", PROMPT, greedy(1)))
    await client.stop()
    assert client.state == "dead"


async def test_signals_are_reported_after_every_step(tiny_model: Path) -> None:
    seen: list[EngineSignals] = []
    client = EngineClient(EngineConfig(str(tiny_model), num_threads=1), on_signals=seen.append)
    await client.start()
    await collect(client, GenerationRequest("a", PROMPT, greedy(10, ignore_eos=True)))
    await client.stop()
    steps = [signals.steps for signals in seen]
    assert steps == list(range(steps[0], steps[0] + 10))
    assert client.signals == seen[-1]


async def test_a_bad_model_fails_the_start_with_its_own_error_in_one_line(tmp_path: Path) -> None:
    client = EngineClient(EngineConfig(str(tmp_path / "nowhere")))
    with pytest.raises(ModelNotFound, match=r"^model folder .*nowhere does not exist$"):
        await client.start()
    assert client.state == "stopped"
    assert client.pid is not None
    assert not is_running(client.pid)
    with pytest.raises(EngineStartError):
        await client.start()


@pytest.mark.parametrize(("sent", "killed"), [(signal.SIGKILL, True), (signal.SIGUSR1, False)])
async def test_an_engine_that_is_killed_while_it_starts_is_told_from_one_that_ends(
    tiny_model: Path, sent: signal.Signals, killed: bool
) -> None:
    client = EngineClient(EngineConfig(str(tiny_model), num_threads=1))
    starting = asyncio.get_running_loop().create_task(client.start())
    while client.pid is None:  # noqa: ASYNC110 (a process sets no event)
        await asyncio.sleep(0)
    os.kill(client.pid, sent)
    with pytest.raises(EngineStartError) as caught:
        await starting
    assert isinstance(caught.value, EngineKilled) == killed


async def test_a_cancelled_start_leaves_no_process(tiny_model: Path) -> None:
    client = EngineClient(EngineConfig(str(tiny_model), num_threads=1))
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        starting = group.create_task(client.start())
        while client.pid is None:  # noqa: ASYNC110 (a process sets no event)
            await asyncio.sleep(0.01)
        starting.cancel()
    assert starting.cancelled()
    assert not is_running(client.pid)
    assert client.state == "stopped"


@shared
async def test_ctrl_c_is_left_to_the_parent(client: EngineClient) -> None:
    assert client.pid is not None
    os.kill(client.pid, signal.SIGINT)
    assert (await collect(client, GenerationRequest("a", PROMPT, greedy(1)))).finish_reason is not None


PARENT = """
import asyncio, sys
from engine.client import EngineClient
from engine.engine import Engine
from engine.values import EngineConfig, GenerationRequest, SamplingParams

async def main():
    client = EngineClient(EngineConfig(sys.argv[1], num_threads=1))
    await client.start()
    client.submit(GenerationRequest("a", (5, 6), SamplingParams(1000, ignore_eos=True)))
    print(client.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_the_engine_ends_when_its_parent_is_killed(tiny_model: Path) -> None:
    words = [sys.executable, "-c", PARENT, str(tiny_model)]
    with ForkedPopen(words, stdout=subprocess.PIPE, cwd=REPOSITORY) as parent:
        assert parent.stdout is not None
        pid = int(await asyncio.to_thread(parent.stdout.readline))
        assert is_running(pid)
        parent.kill()
    await until(lambda: not is_running(pid))


def test_the_client_works_on_uvloop(tiny_model: Path) -> None:
    async def main() -> list[int]:
        async with running(tiny_model) as client:
            return (
                await collect(client, GenerationRequest("a", PROMPT, greedy(5, ignore_eos=True)))
            ).token_ids

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert len(runner.run(main())) == 5


def test_importing_the_client_does_not_import_torch() -> None:
    code = (
        "import sys, engine, engine.values, engine.errors, engine.limits, engine.client\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'safetensors', 'transformers'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


async def test_an_engine_that_fails_says_why_before_it_dies(tiny_model: Path) -> None:
    client = EngineClient(EngineConfig(str(tiny_model), num_threads=1))
    await client.start()
    ticket = client.submit(GenerationRequest("a", PROMPT, SamplingParams(500, ignore_eos=True)))
    assert client._transport is not None
    client._transport.write(b"\x00\x00\x00\x01\xc1")  # not a frame: the child cannot know what comes after it
    with pytest.raises(EngineDead, match="the engine failed: DecodeError"):
        while True:
            await ticket.receive()
    await client.stop()


@shared
async def test_several_tickets_are_received_together_and_each_gets_its_own(client: EngineClient) -> None:
    prompts = random_prompts(3, 512, longest=30)
    requests = [GenerationRequest(str(n), p, greedy(10 + n, ignore_eos=True)) for n, p in enumerate(prompts)]
    expected = [await collect(client, one) for one in requests]
    tickets = [client.submit(one) for one in requests]
    open_tickets, answers = dict(zip(tickets, range(3), strict=True)), [Answer() for _ in tickets]
    while open_tickets:
        for ticket, output in await receive_any(open_tickets):
            assert output.request_id == ticket.request_id
            answers[open_tickets[ticket]].take(output)
            if output.finish_reason is not None:
                del open_tickets[ticket]
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]


async def test_the_death_of_the_engine_ends_a_wait_for_several_tickets(tiny_model: Path) -> None:
    async with running(tiny_model) as client:
        tickets = [client.submit(GenerationRequest(n, PROMPT, greedy(900, ignore_eos=True))) for n in "ab"]
        await receive_any(tickets)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(EngineDead):
            while True:
                await receive_any(tickets)


@shared
async def test_an_invalid_grammar_is_reported_with_its_problem(client: EngineClient) -> None:
    shape = StructuredOutput(GrammarKind.REGEX, "[a-")
    answer = await collect(client, GenerationRequest("a", PROMPT, SamplingParams(5, structured=shape)))
    assert answer.last is not None and answer.last.detail is not None
    assert (answer.last.error, answer.last.request_id) == ("invalid_grammar", "a")
    assert "unclosed character class" in answer.last.detail
