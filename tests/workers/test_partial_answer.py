"""Resuming a partial answer on a worker: the request, and how its answer is joined and counted."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from typing import Any

import pytest

from gateway.backends.port import BackendState, Continue, PartialAnswer, Work
from gateway.backends.workers.answer import CompletionReader
from gateway.backends.workers.dialect import MAX_ECHOED_PROMPT, CompletionWriter, Dialect
from gateway.contracts.events import Delta
from gateway.contracts.values import FinishReason, Usage
from resilience.failures import BackendFailure, FailureKind
from tests.conformance.harness import collect
from tests.workers.raw_worker import (
    DONE,
    STREAM_HEAD,
    RawWorker,
    answers,
    chunk,
    ending,
    event,
    make_pool,
    make_writer,
    piece,
    pool,
    sends,
    token_bytes,
    until,
    usage,
    work,
)

PARTIAL = PartialAnswer("It is ", (73, 116, 32))


def sent(writer: CompletionWriter, asked: Work) -> dict[str, Any]:
    return json.loads(writer.write(asked).body)  # type: ignore[no-any-return]


def test_each_dialect_declares_what_its_servers_can_go_on_with() -> None:
    ways = {
        (dialect, ids): make_writer("base", dialect, ids).continues
        for dialect in Dialect
        for ids in (False, True)
    }
    assert ways == {
        (Dialect.VLLM, False): {Continue.TEXT},
        (Dialect.VLLM, True): {Continue.TOKENS, Continue.CHATS},
        (Dialect.SLUICE, False): frozenset(),
        (Dialect.SLUICE, True): {Continue.TOKENS},
        (Dialect.OPENAI, False): frozenset(),
        (Dialect.OPENAI, True): frozenset(),
    }


def test_partial_ids_follow_the_prompts_ids_and_partial_text_is_a_last_message() -> None:
    ids = sent(make_writer("base", token_ids=True), work(ids=[1, 2], partial=PARTIAL))
    assert ids["prompt"] == [1, 2, 73, 116, 32]
    chat = sent(make_writer("base"), work("Hello", partial=PARTIAL))
    assert chat["messages"] == [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "It is"},
    ]
    assert chat["continue_final_message"] is True
    assert chat["add_generation_prompt"] is False


def test_a_partial_answer_of_white_space_alone_is_no_message() -> None:
    assert "continue_final_message" not in sent(make_writer("base"), work(partial=PartialAnswer(" \n")))


def test_a_raw_prompt_is_resumed_from_token_ids_alone() -> None:
    writer = make_writer("base")
    raw = work(ids=[1, 2], messages=(), partial=PARTIAL)
    assert writer.ways(raw) == {Continue.TOKENS}
    assert sent(writer, raw)["prompt"] == [1, 2, 73, 116, 32]
    assert make_writer("base", Dialect.OPENAI).ways(raw) == frozenset()


def test_a_seeded_answer_goes_on_with_another_seed_in_64_bits() -> None:
    writer = make_writer("base", token_ids=True)
    assert sent(writer, work(partial=PARTIAL, sampling={"seed": 5}))["seed"] == 8
    assert sent(writer, work(partial=PARTIAL, sampling={"seed": 2**63 - 1}))["seed"] == -(2**63) + 2
    assert sent(make_writer("base"), work(partial=PartialAnswer("It is"), sampling={"seed": 5}))["seed"] == 10
    assert "seed" not in sent(writer, work(partial=PARTIAL))


def test_ids_of_an_answer_are_asked_of_vllm_unless_the_prompt_that_it_repeats_is_too_long() -> None:
    assert sent(make_writer("base"), work(ids=[1] * MAX_ECHOED_PROMPT))["return_token_ids"] is True
    assert "return_token_ids" not in sent(make_writer("base"), work(ids=[1] * (MAX_ECHOED_PROMPT + 1)))
    assert "return_token_ids" not in sent(make_writer("base", Dialect.SLUICE), work())


def fed(reader: CompletionReader, *reads: bytes) -> list[Delta]:
    return [delta for read in reads for delta in reader.feed(read)]


def test_ids_that_a_worker_tells_come_with_the_text_they_are_of() -> None:
    reader = CompletionReader(work(), token_bytes)
    deltas = fed(
        reader,
        piece("a", token_ids=[97]),
        piece("", token_ids=[98]),  # the worker holds its text back
        piece("bc", token_ids=[99, 100]),
        piece("d", token_ids=[]) + piece("e", token_ids=[101]),
        event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "token_ids": [2]}]}),
        usage(5, 6) + DONE,
    )
    assert [(one.text, one.tokens, one.token_ids) for one in deltas] == [
        ("a", 1, (97,)),
        ("bc", 3, (98, 99, 100)),
        ("de", 1, (101,)),
    ]
    rest, completion = reader.finish()
    assert rest == Delta("", 1, token_ids=(2,))
    assert completion.usage == Usage(5, 6)


def test_ids_of_several_texts_keep_apart() -> None:
    reader = CompletionReader(work(sampling={"n": 2}), token_bytes)
    both = piece("a", token_ids=[97]) + piece("x", 1, token_ids=[120, 121])
    assert [(one.index, one.tokens, one.token_ids) for one in fed(reader, both)] == [
        (0, 1, (97,)),
        (1, 2, (120, 121)),
    ]


def test_token_ids_are_counted_when_the_stream_has_no_usage() -> None:
    reader = CompletionReader(work(ids=[1, 2]), token_bytes)
    fed(reader, piece("a", token_ids=[97]), piece("", token_ids=[98]) + ending("length") + DONE)
    rest, completion = reader.finish()
    assert rest == Delta("", 1, token_ids=(98,))
    assert completion.usage == Usage(2, 2)


async def test_the_usage_is_of_the_requests_own_prompt_and_of_this_call() -> None:
    async with pool(RawWorker([answers("not", " far.", prompt=9, cached=8)]), prompt="token_ids") as backend:
        answer = await collect(backend, work(ids=[1, 2], partial=PARTIAL))
    assert answer.text == "not far."
    assert answer.completion.usage == Usage(2, 2, 2)


@pytest.mark.parametrize(("reported", "billed"), [(66, 63), (3, 5), (0, 5)])
async def test_the_prompt_of_an_answer_that_is_resumed_from_its_text_has_the_workers_count_without_it(
    reported: int, billed: int
) -> None:
    """The count of a prompt that is sent as messages may be an estimate; a worker may report no usable one."""
    partial = PartialAnswer("It is", tokens=3)
    async with pool(RawWorker([answers(" not", " far.", prompt=reported)]), dialect="vllm") as backend:
        answer = await collect(backend, work("Hello", partial=partial))
    assert answer.completion.usage == Usage(billed, 2)


@pytest.mark.parametrize("alone", [False, True])
async def test_an_answer_is_resumed_on_another_worker_than_the_one_that_broke_it_off(alone: bool) -> None:
    workers = [RawWorker([answers("Hi")]) for _ in range(1 if alone else 2)]
    async with pool(*workers, prompt="token_ids", idle_timeout_seconds=1) as backend:
        prompt = [1] * 200
        await collect(backend, work(ids=prompt))
        # The worker with the prompt in its cache hangs once; its probes are still answered.
        [hung] = [one for one in workers if one.requests]
        hung.behaviours = [sends(STREAM_HEAD, chunk(piece("Hi")), then="hold"), answers("Hi")]
        asked = work(ids=prompt)
        with pytest.raises(BackendFailure) as caught:
            await collect(backend, asked)
        assert (caught.value.kind, len(hung.requests)) == (FailureKind.TIMEOUT, 2)
        await collect(backend, work(ids=prompt, partial=PARTIAL, call_budget=asked.call_budget))
        assert len(hung.requests) == (3 if alone else 2)


async def test_white_space_at_the_resume_point_is_sent_once() -> None:
    worker = RawWorker([answers(" not", " far."), answers("not", " far.")])
    async with pool(worker, dialect="vllm") as backend:
        assert backend.continues == {Continue.TEXT}
        for _ in range(2):
            assert (await collect(backend, work(partial=PartialAnswer("It is ")))).text == "not far."


async def test_a_stop_string_that_began_before_the_break_ends_the_rest_and_the_workers_part() -> None:
    worker = RawWorker([answers("a", "b", *["c"] * 500, delay_s=0.01)])
    async with pool(worker, prompt="token_ids") as backend:
        answer = await collect(backend, work(partial=PARTIAL, sampling={"stop": ("is ab",)}))
        assert answer.text == ""
        assert answer.tokens == answer.completion.usage.output_tokens == 2
        assert answer.completion.finish_reason is FinishReason.STOP


async def test_a_pool_of_plain_openai_refuses_before_anything_is_sent() -> None:
    worker = RawWorker([answers("never")])
    async with pool(worker, dialect="openai") as backend:
        with pytest.raises(BackendFailure, match="cannot resume") as caught:
            await collect(backend, work(partial=PARTIAL))
    assert caught.value.kind is FailureKind.INVALID_INPUT
    assert worker.requests == []


# A worker that streams without an end.
ENDLESS = """
import asyncio

HEAD = b"HTTP/1.1 200 OK\\r\\ncontent-type: text/event-stream\\r\\ntransfer-encoding: chunked\\r\\n\\r\\n"
EVENT = b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\\n\\n'

async def serve(reader, writer):
    while (head := await reader.readuntil(b"\\r\\n\\r\\n")).startswith(b"GET"):
        writer.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: 0\\r\\n\\r\\n")
    writer.write(HEAD)
    while True:
        writer.write(b"%x\\r\\n%b\\r\\n" % (len(EVENT), EVENT))
        await asyncio.sleep(0.01)

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


async def test_a_worker_killed_in_the_middle_of_a_stream_is_noticed_at_once() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ENDLESS, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    try:
        port = int(await process.stdout.readline())
        url = f"http://127.0.0.1:{port}/v1"
        # With this dialect the pool does not ask for the tokenizer, which this worker would answer endlessly.
        serving = make_pool(url, dialect="openai", idle_timeout_seconds=20, total_timeout_seconds=20)
        [backend] = serving.serving
        answer: list[Delta] = []
        killed_at = 0.0

        async def out(delta: Delta) -> None:
            nonlocal killed_at
            answer.append(delta)
            if len(answer) == 5:
                process.kill()
                killed_at = time.monotonic()

        async with asyncio.TaskGroup() as group:
            loops = group.create_task(serving.run())
            await until(lambda: backend.state is BackendState.READY)
            with pytest.raises(BackendFailure) as caught:
                await backend.generate(work(), out)
            assert time.monotonic() - killed_at < 10.0, "its silence alone would be borne for 20 s"
            loops.cancel()
        assert caught.value.kind is FailureKind.STREAM_BROKEN
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
