"""Workers that die, hang, or send slowly or garbage: what the caller gets, and that nothing leaks."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from budgeting.values import Tool, ToolChoice, ToolChoiceMode
from gateway.backends.port import BackendState
from gateway.contracts.events import Delta
from gateway.contracts.values import FormatType, ResponseFormat
from resilience.failures import BackendFailure, FailureKind
from tests.conformance.harness import collect
from tests.workers.raw_worker import (
    DONE,
    END,
    STREAM_HEAD,
    RawWorker,
    Request,
    answers,
    chunk,
    ending,
    in_use,
    make,
    piece,
    pool,
    refuses,
    sends,
    state_of,
    until,
    usage,
    work,
)

GOOD = answers("Hello", " there")
HALF = chunk(piece("Hello"))
HTML = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 5\r\n\r\n<html"
GARBAGE = b"\x00\xff\x13SSH-2.0-OpenSSH_9.9\r\n" * 3
LONG_HEAD = b"HTTP/1.1 200 OK\r\n" + b"x-filler: %b\r\n" % (b"y" * 1000) * 600
WRONG_CHUNK = STREAM_HEAD + b"zz\r\nnot a length\r\n"

BEFORE_A_TOKEN = {
    "closes before a byte": sends(then="close"),
    "is reset before a byte": sends(then="reset"),
    "closes after the head": sends(STREAM_HEAD),
    "is reset after the head": sends(STREAM_HEAD, then="reset"),
    "ends a stream without an answer": sends(STREAM_HEAD, END),
    "is done before it has begun": sends(STREAM_HEAD, chunk(DONE), END),
    "never answers": sends(then="hold"),
    "sends a head and then nothing": sends(STREAM_HEAD, then="hold"),
    "sends comments only": sends(STREAM_HEAD, *[chunk(b": still here\n\n")] * 3, then="hold"),
    "answers garbage": sends(GARBAGE),
    "answers half a head": sends(b"HTTP/1.1 200 OK\r\ncontent-ty"),
    "answers an endless head": sends(LONG_HEAD, then="hold"),
    "answers HTML": sends(HTML),
    "answers compressed": refuses(200, {}, "content-encoding: gzip"),
    "redirects": refuses(307, {}, "location: https://elsewhere/v1"),
    "answers chunks that are none": sends(WRONG_CHUNK),
    "streams what is no JSON": sends(STREAM_HEAD, chunk(b"data: hello\n\n"), then="hold"),
    "streams JSON of another kind": sends(STREAM_HEAD, chunk(b'data: ["a"]\n\n'), then="hold"),
    "streams an error": sends(STREAM_HEAD, chunk(b'data: {"error": {"message": "x", "code": 500}}\n\n')),
    "streams a choice that nobody asked for": sends(STREAM_HEAD, chunk(piece("x", 7)), then="hold"),
    "answers 500": refuses(500, {"error": {"message": "boom"}}),
    "answers 502 without a body": sends(b"HTTP/1.1 502 Bad\r\ncontent-length: 0\r\n\r\n"),
    "answers 503": refuses(503),
    "answers 429": refuses(429),
    "wants another protocol": sends(
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n"
    ),
}


# Faults that end only by a timeout. The good worker has the same timeout, so it must not be too short.
SILENT = {"never answers", "sends a head and then nothing", "sends comments only", "falls silent"}
SHORT = {"first_token_timeout_seconds": 2.0, "idle_timeout_seconds": 2.0}


def limits(fault: str) -> dict[str, float]:
    return SHORT if fault in SILENT else {}


@pytest.mark.parametrize("fault", BEFORE_A_TOKEN)
async def test_until_the_first_token_another_worker_takes_over_unseen(fault: str) -> None:
    bad, good = RawWorker([BEFORE_A_TOKEN[fault]]), RawWorker([GOOD])
    async with pool(bad, good, affinity=False, **limits(fault)) as backend:
        for _ in range(2):
            answer = await collect(backend, work())
            assert answer.text == "Hello there"
            assert answer.completion.usage.output_tokens == answer.tokens == 2
        await until(lambda: in_use(backend) == 0)
    assert len(bad.requests) >= 1 and len(good.requests) == 2


@pytest.mark.parametrize("fault", BEFORE_A_TOKEN)
async def test_with_no_other_worker_the_failure_is_one_of_the_closed_set(fault: str) -> None:
    bad = RawWorker([BEFORE_A_TOKEN[fault]])
    async with pool(bad, **limits(fault)) as backend:
        with pytest.raises(BackendFailure) as caught:
            await collect(backend, work())
        assert caught.value.kind in (
            FailureKind.BACKEND_UNAVAILABLE,
            FailureKind.STREAM_BROKEN,
            FailureKind.TIMEOUT,
            FailureKind.INTERNAL,
            FailureKind.THROTTLED,
        )
        assert len(bad.requests) == 1


AFTER_A_TOKEN = {
    "closes": (sends(STREAM_HEAD, HALF), FailureKind.STREAM_BROKEN),
    "is reset": (sends(STREAM_HEAD, HALF, then="reset"), FailureKind.STREAM_BROKEN),
    "ends the body": (sends(STREAM_HEAD, HALF, END), FailureKind.STREAM_BROKEN),
    "falls silent": (sends(STREAM_HEAD, HALF, then="hold"), FailureKind.TIMEOUT),
    "turns to garbage": (sends(STREAM_HEAD, HALF, GARBAGE), FailureKind.STREAM_BROKEN),
    "streams an error": (
        sends(STREAM_HEAD, HALF, chunk(b'data: {"error": {"message": "x", "code": 500}}\n\n'), then="hold"),
        FailureKind.INTERNAL,
    ),
    "sends an endless line": (
        sends(STREAM_HEAD, HALF, *[chunk(b"data: " + b"x" * 300_000)] * 5, then="hold"),
        FailureKind.STREAM_BROKEN,
    ),
}


@pytest.mark.parametrize("fault", AFTER_A_TOKEN)
async def test_after_the_first_token_a_broken_answer_is_not_started_again(fault: str) -> None:
    behaviour, kind = AFTER_A_TOKEN[fault]
    bad, good = RawWorker([behaviour]), RawWorker([GOOD])
    async with pool(bad, good, affinity=False, **limits(fault)) as backend:
        answer: list[Delta] = []

        async def out(delta: Delta) -> None:
            answer.append(delta)

        for _ in range(4):
            if bad.requests:
                break
            answer.clear()
            try:
                await backend.generate(work(), out)
            except BackendFailure as failure:
                assert failure.kind is kind
                assert [delta.text for delta in answer] == ["Hello"]
        assert len(bad.requests) == 1
        await until(lambda: in_use(backend) == 0)


async def test_an_answer_whose_texts_have_all_ended_is_whole_without_done_and_without_usage() -> None:
    worker = RawWorker([sends(STREAM_HEAD, HALF, chunk(ending("length")), END)])
    async with pool(worker) as backend:
        answer = await collect(backend, work("abc"))
        assert answer.text == "Hello"
        assert answer.completion.finish_reason == "length"
        assert answer.completion.usage.input_tokens == 3
        assert answer.completion.usage.output_tokens == answer.tokens == 1


@pytest.mark.parametrize("then", ["close", "reset", "hold"])
async def test_an_answer_whose_texts_have_all_ended_is_whole_though_the_worker_dies_or_hangs_before_its_usage(
    then: str,
) -> None:
    both = chunk(piece("Hello") + piece("Bye", 1) + ending())
    worker = RawWorker([sends(STREAM_HEAD, both, chunk(ending("length", 1)), then=then)])
    async with pool(worker, idle_timeout_seconds=0.5) as backend:
        answer = await collect(backend, work("abc", sampling={"n": 2}))
        assert answer.completion.finish_reason == "stop"
        assert answer.completion.others == ("length",)
        assert (answer.completion.usage.input_tokens, answer.completion.usage.output_tokens) == (3, 2)
    assert len(worker.requests) == 1
    half = RawWorker([sends(STREAM_HEAD, both, then=then)])
    async with pool(half, idle_timeout_seconds=0.5) as backend:
        with pytest.raises(BackendFailure) as caught:
            await collect(backend, work("abc", sampling={"n": 2}))
    assert caught.value.kind is (FailureKind.TIMEOUT if then == "hold" else FailureKind.STREAM_BROKEN)


async def test_an_answer_of_a_server_that_does_not_stream_is_whole() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": "Hello", "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    body = {"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}
    async with pool(RawWorker([refuses(200, body)])) as backend:
        answer = await collect(backend, work())
        assert answer.text == "Hellof{}", "the texts of all events"
        assert answer.completion.finish_reason == "tool_calls"
        assert (answer.completion.usage.input_tokens, answer.tokens) == (7, 2)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"error": {"message": "x", "code": 429}}, FailureKind.THROTTLED),
        ({"error": {"message": "x", "type": "invalid_request_error"}}, FailureKind.INVALID_INPUT),
        ({"detail": "x"}, FailureKind.BACKEND_UNAVAILABLE),
        ([], FailureKind.BACKEND_UNAVAILABLE),
    ],
)
async def test_an_error_with_status_200_is_told_by_its_kind(body: object, kind: FailureKind) -> None:
    async with pool(RawWorker([refuses(200, body)])) as backend:
        with pytest.raises(BackendFailure) as caught:
            await collect(backend, work())
        assert caught.value.kind is kind


async def test_an_answer_that_ends_with_its_connection_is_whole() -> None:
    head = b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    worker = RawWorker([sends(head, piece("Hello") + ending() + DONE)])
    async with pool(worker) as backend:
        assert (await collect(backend, work())).text == "Hello"


async def test_slow_tokens_are_no_fault() -> None:
    worker = RawWorker([answers(*"abcdefghijklmnopqrstuvwxyz", delay_s=0.12)])
    async with pool(worker, idle_timeout_seconds=3) as backend:
        text = (await collect(backend, work())).text
    assert text == "abcdefghijklmnopqrstuvwxyz", "longer than the silence allowed, in all"


async def test_an_answer_that_trickles_ends_with_the_total_timeout() -> None:
    async def drip(request: object) -> None:
        await request.send(STREAM_HEAD, HALF)  # type: ignore[attr-defined]
        while True:
            await request.send(chunk(b":" * 10))  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)

    worker = RawWorker([drip])
    async with pool(worker, total_timeout_seconds=0.6) as backend:
        began = time.monotonic()
        with pytest.raises(BackendFailure, match="did not end within") as caught:
            await collect(backend, work())
        assert caught.value.kind is FailureKind.TIMEOUT
        assert time.monotonic() - began < 15.0


async def test_a_worker_that_dies_loses_no_request_that_had_not_streamed() -> None:
    dying, living = RawWorker([answers("x", delay_s=0.2)]), RawWorker([answers("x", delay_s=0.01)])
    async with pool(dying, living, affinity=False) as backend:
        async with asyncio.TaskGroup() as group:
            answer = [group.create_task(collect(backend, work())) for _ in range(20)]
            await until(lambda: len(dying.requests) >= 5)
            await dying.die()
        assert [task.result().text for task in answer] == ["x"] * 20
        await until(lambda: state_of(backend)[0].state == "ejected")
        assert backend.state is BackendState.READY


class Stoppable(RawWorker):
    """Once ``stopped``, it reads requests and answers none of them, like a process after SIGSTOP."""

    stopped = False

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if self.stopped:
            await reader.read()
            return False
        return await super()._one(reader, writer)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("other", [True, False])
async def test_requests_leave_a_worker_that_answers_neither_them_nor_its_probes_if_there_is_another(
    begun: bool, other: bool
) -> None:
    hangs = sends(*([STREAM_HEAD, HALF] if begun else []), then="hold")
    frozen, good = Stoppable([hangs]), RawWorker([GOOD])
    workers = [frozen, good] if other else [frozen]
    limits = {"first_token_timeout_seconds": 60, "idle_timeout_seconds": 60, "probe_timeout_seconds": 0.5}

    async def outcome() -> str:
        try:
            return (await collect(backend, work())).text
        except BackendFailure as failure:
            return str(failure)

    async with pool(*workers, affinity=False, **limits) as backend, asyncio.TaskGroup() as group:
        while not frozen.requests:
            asked = group.create_task(outcome())
            await asyncio.wait([asked], timeout=0.5)
        frozen.stopped = True
        if other:
            assert ("nothing came" in await asked) if begun else (await asked == "Hello there")
        else:
            await asyncio.sleep(5)
            assert not asked.done(), "no other worker can answer"
            asked.cancel()


async def test_a_worker_that_comes_back_is_given_requests_again() -> None:
    first, second = RawWorker([GOOD]), RawWorker([GOOD])
    async with pool(first, second, affinity=False) as backend:
        await first.die()
        await until(lambda: state_of(backend)[0].state == "ejected")
        before = len(first.requests)
        await collect(backend, work())
        await first.start()
        await until(lambda: state_of(backend)[0].state == "in_service")
        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(collect(backend, work()))
        assert len(first.requests) > before


async def test_a_pool_without_a_worker_in_service_is_not_ready_and_says_when_to_come_back() -> None:
    worker = RawWorker([GOOD])
    async with pool(worker) as backend:
        await worker.die()
        await until(lambda: backend.state is not BackendState.READY)
        assert backend.load is None
        with pytest.raises(BackendFailure, match="no worker of worker is in service") as caught:
            await collect(backend, work())
        assert caught.value.kind is FailureKind.BACKEND_UNAVAILABLE
        assert (caught.value.retry_after_s or 0) >= 1
        await worker.start()
        await until(lambda: backend.state is BackendState.READY)
        assert (await collect(backend, work())).text == "Hello there"


async def test_a_pool_whose_workers_were_never_there_is_starting() -> None:
    gone = RawWorker([GOOD])
    await gone.start()
    await gone.die()
    async with pool(gone, started=False) as backend:
        await asyncio.sleep(0.15)
        assert backend.state is BackendState.STARTING


async def test_the_last_worker_stays_in_service_while_its_probes_answer() -> None:
    worker = RawWorker([refuses(500)] * 6 + [GOOD])
    async with pool(worker) as backend:
        for _ in range(6):
            with pytest.raises(BackendFailure):
                await collect(backend, work())
        assert backend.state is BackendState.READY
        assert (await collect(backend, work())).text == "Hello there"


async def test_a_worker_that_reports_its_engine_dead_is_ejected_at_once_and_counts_as_a_restart() -> None:
    dead = {"message": "EngineCore encountered an issue. See stack trace (above) for the root cause."}
    event = b"data: " + json.dumps({"error": {**dead, "code": 500}}).encode() + b"\n\n"
    for fault in (refuses(500, {"error": dead}), sends(STREAM_HEAD, HALF, chunk(event))):
        async with pool(RawWorker([fault])) as backend:
            with pytest.raises(BackendFailure) as caught:
                await collect(backend, work())
            assert caught.value.kind is FailureKind.ENGINE_DEAD
            assert not caught.value.counts, "an open circuit would outlast the restart"
            assert state_of(backend)[0].state == "ejected"


async def test_a_worker_that_is_late_for_its_probes_stays_in_service_while_it_sends_answers() -> None:
    worker = RawWorker([answers(*"abcdefghij", delay_s=0.15)])
    async with pool(worker, probe_timeout_seconds=0.5) as backend:
        async with asyncio.TaskGroup() as group:
            callers = [group.create_task(collect(backend, work())) for _ in range(3)]
            await until(lambda: len(worker.requests) == 3)
            worker.probe_delay_s, before = 3.0, worker.probes
            await until(lambda: worker.probes >= before + 2 or all(one.done() for one in callers))
            callers.append(group.create_task(collect(backend, work())))
        assert [one.result().text for one in callers] == ["abcdefghij"] * 4
        assert state_of(backend)[0].ejections == 0
        await until(lambda: state_of(backend)[0].state == "ejected")


async def test_a_worker_that_fails_repeatedly_is_ejected_and_another_one_serves() -> None:
    bad, good = RawWorker([refuses(500)]), RawWorker([GOOD])
    async with pool(bad, good, affinity=False, eject_seconds=60) as backend:
        for _ in range(12):
            assert (await collect(backend, work())).text == "Hello there"
        assert state_of(backend)[0].state == "ejected"
        assert len(bad.requests) == 3


@pytest.mark.parametrize(
    "shape",
    [
        {"response_format": ResponseFormat(FormatType.REGEX, "a|b")},
        {"tools": (Tool("look"),), "tool_choice": ToolChoice(ToolChoiceMode.REQUIRED)},
    ],
)
async def test_a_shape_that_makes_workers_fail_ejects_none_and_counts_against_no_pool(
    shape: dict[str, Any],
) -> None:
    workers = [RawWorker([refuses(500)] * 6 + [GOOD]) for _ in range(2)]
    async with pool(*workers, affinity=False, eject_seconds=60) as backend:
        for _ in range(6):
            with pytest.raises(BackendFailure) as caught:
                await collect(backend, work(**shape))
            assert caught.value.kind is FailureKind.INTERNAL and not caught.value.counts
        assert [one.ejections for one in state_of(backend)] == [0, 0]
        assert (await collect(backend, work())).text == "Hello there"


@pytest.mark.parametrize(("probe", "counts"), [(200, False), (403, True)])
async def test_a_firewalls_403_counts_against_a_worker_only_if_it_refuses_probes_too(
    probe: int, counts: bool
) -> None:
    async def firewall(request: Request) -> None:
        await request.whole(403, b"<!DOCTYPE html><title>Attention</title>", kind="text/html")

    worker = RawWorker([firewall], statuses={"/health": probe})
    async with pool(worker) as backend:
        with pytest.raises(BackendFailure, match="a firewall") as caught:
            await collect(backend, work())
        assert caught.value.kind is FailureKind.ACCESS_DENIED and caught.value.counts == counts
    blocked, good = RawWorker([firewall], statuses={"/health": probe}), RawWorker([GOOD])
    async with pool(blocked, good, affinity=False, eject_seconds=60) as backend:
        for _ in range(12):
            assert (await collect(backend, work())).text == "Hello there"
        assert [one.ejections for one in state_of(backend)] == [counts, 0]


async def test_a_connection_closed_while_idle_fails_no_request() -> None:
    async def once(request: object) -> None:
        await GOOD(request)  # type: ignore[arg-type]
        request.close()  # type: ignore[attr-defined]

    worker = RawWorker([once])
    async with pool(worker) as backend:
        for _ in range(5):
            assert (await collect(backend, work())).text == "Hello there"
        assert state_of(backend)[0].ejections == 0


async def test_a_reset_that_races_the_next_request_is_tried_again_on_a_new_connection() -> None:
    worker = RawWorker([GOOD, sends(then="reset"), GOOD])
    async with pool(worker) as backend:
        await collect(backend, work())
        assert (await collect(backend, work())).text == "Hello there"
    assert len(worker.requests) == 3


async def test_cancelling_closes_the_connection_at_once() -> None:
    worker = RawWorker([sends(STREAM_HEAD, HALF, then="hold"), sends(then="hold"), GOOD])
    async with pool(worker, idle_timeout_seconds=30, first_token_timeout_seconds=30) as backend:
        for expected in (1, 2):
            async with asyncio.TaskGroup() as group:
                call = group.create_task(collect(backend, work()))
                await until(lambda n=expected: len(worker.requests) == n)  # type: ignore[misc]
                await asyncio.sleep(0.02)
                call.cancel()
            assert in_use(backend) == 0
        await until(lambda: worker.connections <= 2)  # those of the probe and the scrape may remain
        assert (await collect(backend, work())).text == "Hello there"


async def test_a_sink_that_raises_closes_the_connection() -> None:
    worker = RawWorker([sends(STREAM_HEAD, HALF, then="hold")])

    class Full(Exception):
        pass

    async def out(delta: Delta) -> None:
        raise Full

    async with pool(worker, idle_timeout_seconds=30) as backend:
        with pytest.raises(Full):
            await backend.generate(work(), out)
        assert in_use(backend) == 0


async def test_a_slow_reader_holds_the_worker_back_and_loses_nothing() -> None:
    async def flood(request: object) -> None:
        await request.send(STREAM_HEAD)  # type: ignore[attr-defined]
        for _ in range(300):
            await request.send(chunk(piece("x" * 10_000)))  # type: ignore[attr-defined]
        await request.send(chunk(ending() + DONE), END)  # type: ignore[attr-defined]

    worker, got = RawWorker([flood]), 0

    async def out(delta: Delta) -> None:
        nonlocal got
        got += len(delta.text)
        await asyncio.sleep(0.02)

    async with pool(worker) as backend:
        await backend.generate(work(), out)
        assert got == 3_000_000


async def test_no_more_connections_than_allowed_are_opened_and_the_circuit_does_not_count_the_rest() -> None:
    worker = RawWorker([answers("x", delay_s=0.2)])
    async with pool(worker, max_connections=2) as backend:
        async with asyncio.TaskGroup() as group:
            answer = [group.create_task(_outcome(backend)) for _ in range(5)]
        kinds = [task.result() for task in answer]
        assert kinds.count("x") == 2 and kinds.count((FailureKind.THROTTLED, False)) == 3
        assert state_of(backend)[0].ejections == 0


async def _outcome(backend: object) -> object:
    try:
        return (await collect(backend, work())).text  # type: ignore[arg-type]
    except BackendFailure as failure:
        return failure.kind, failure.counts


async def test_refused_connections_are_a_quick_failure() -> None:
    async with pool(RawWorker([GOOD]), RawWorker([GOOD]), affinity=False) as backend:
        pass
    lonely = make(*[one.url for one in state_of(backend)])
    with pytest.raises(BackendFailure) as caught:
        await collect(lonely, work())
    assert caught.value.kind is FailureKind.BACKEND_UNAVAILABLE


async def test_a_slow_reader_of_the_last_piece_does_not_end_the_next_request_on_its_connection() -> None:
    """The worker reports a token that no piece had; the connection serves the next request meanwhile."""
    whole, read = asyncio.Event(), asyncio.Event()

    async def first(request: Request) -> None:
        await request.send(STREAM_HEAD, HALF, chunk(ending() + usage(5, 2) + DONE))
        await whole.wait()
        await request.send(END)

    async def second(request: Request) -> None:
        await request.send(STREAM_HEAD, HALF)
        read.set()
        await asyncio.sleep(0.1)
        await request.send(chunk(ending() + usage(5, 1) + DONE), END)

    async def slow(delta: Delta) -> None:
        if not delta.text:
            whole.set()
            await read.wait()

    worker = RawWorker([first, second])
    async with pool(worker) as backend, asyncio.TaskGroup() as group:
        slowly = group.create_task(backend.generate(work(), slow))
        await whole.wait()
        await asyncio.sleep(0.1)  # the end arrives
        answer = await collect(backend, work())
    assert (slowly.result().usage.output_tokens, answer.text) == (2, "Hello")
