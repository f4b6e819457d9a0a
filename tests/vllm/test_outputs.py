"""The outputs of vLLM's core, from the socket to the request."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gateway.backends.vllm.compat.answer import Outputs
from gateway.backends.vllm.compat.receiver import receive_faster
from tests.vllm.conftest import needs_vllm

pytestmark = needs_vllm


def output(text: str) -> Any:
    from vllm.outputs import CompletionOutput, RequestOutput

    one = CompletionOutput(0, text, [7], None, None)
    return RequestOutput("r", None, [1], None, [one], finished=False)


class OutputRig:
    """The outputs of one request, and the texts taken; ``take`` returns False after a text of ``ends``."""

    def __init__(self, ends: str = "") -> None:
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.output_processor import RequestOutputCollector

        self.collector = RequestOutputCollector(RequestOutputKind.DELTA, "r")
        self.reader_is_late = False
        self.outputs = Outputs(self.collector, lambda: not self.reader_is_late)
        self.taken: list[str] = []
        self._ends = ends

    def take(self, given: Any) -> bool:
        self.taken.append(given.outputs[0].text)
        return not self._ends or self.taken[-1] not in self._ends

    async def pass_on(self) -> None:
        await self.outputs.pass_on(self.take)


async def test_an_output_is_passed_on_by_the_call_that_puts_it() -> None:
    rig = OutputRig()
    rig.collector.put(output("a"))
    async with asyncio.TaskGroup() as tasks:
        passing = tasks.create_task(rig.pass_on())
        await asyncio.sleep(0)
        assert rig.taken == ["a"]
        rig.collector.put(output("b"))
        assert rig.taken == ["a", "b"] and not rig.collector.ready.is_set()
        passing.cancel()


async def test_outputs_are_merged_while_those_of_later_steps_are_unread() -> None:
    rig = OutputRig()
    async with asyncio.TaskGroup() as tasks:
        passing = tasks.create_task(rig.pass_on())
        await asyncio.sleep(0)
        rig.reader_is_late = True
        rig.collector.put(output("a"))
        rig.reader_is_late = False
        rig.collector.put(output("b"))
        assert not rig.taken
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert rig.taken == ["ab"]
        rig.collector.put(output("c"))
        assert rig.taken == ["ab", "c"]
        passing.cancel()


async def test_outputs_after_one_that_has_to_be_awaited_are_taken_by_the_next_call() -> None:
    rig = OutputRig(ends="a")
    async with asyncio.TaskGroup() as tasks:
        passing = tasks.create_task(rig.pass_on())
        await asyncio.sleep(0)
        for text in "abc":
            rig.collector.put(output(text))
        await passing
    assert rig.taken == ["a"]
    async with asyncio.TaskGroup() as tasks:
        passing = tasks.create_task(rig.pass_on())
        await asyncio.sleep(0)
        assert rig.taken == ["a", "bc"]
        passing.cancel()


async def test_an_error_comes_after_what_was_put_before_it() -> None:
    rig = OutputRig()
    failure: Exception | None = None

    async def passed_on() -> None:
        nonlocal failure
        try:
            await rig.pass_on()
        except ValueError as error:
            failure = error

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(passed_on())
        await asyncio.sleep(0)
        rig.collector.put(output("a"))
        rig.collector.put(ValueError("the engine is dead"))
    assert rig.taken == ["a"] and str(failure) == "the engine is dead"


async def test_every_message_of_the_core_is_received_in_order(tmp_path: Path) -> None:
    import zmq
    import zmq.asyncio

    context = zmq.asyncio.Context()
    address = f"ipc://{tmp_path}/core"
    theirs = zmq.Context().socket(zmq.PUSH)
    socket = context.socket(zmq.PULL)
    socket.bind(address)
    theirs.connect(address)
    got: list[list[bytes]] = []
    resources = SimpleNamespace(output_socket=socket, output_queue_task=None)

    async def receive(receiver: Any) -> None:
        while True:
            got.append([frame.bytes for frame in await receiver.recv_multipart(copy=False)])

    async def until(count: int) -> None:
        async with asyncio.timeout(30):
            while len(got) < count:  # noqa: ASYNC110 - no event signals it
                await asyncio.sleep(0.005)

    async with asyncio.TaskGroup() as tasks:

        def begin() -> None:
            resources.output_queue_task = tasks.create_task(receive(resources.output_socket))

        client = SimpleNamespace(resources=resources, _ensure_output_queue_task=begin)
        receive_faster(client, SimpleNamespace(take=lambda frames, more: False, busy=False))
        assert resources.output_socket is socket
        await asyncio.sleep(0)
        for number in range(3):
            theirs.send_multipart([b"%d" % number, b"more"])
        await until(3)
        await asyncio.sleep(0.02)
        for number in range(3, 200):
            theirs.send_multipart([b"%d" % number])
        await until(200)
        resources.output_queue_task.cancel()
    assert got == [[b"%d" % number, b"more"] for number in range(3)] + [[b"%d" % n] for n in range(3, 200)]
    theirs.close(linger=0)
    socket.close(linger=0)


async def test_a_socket_that_vllm_closes_while_a_message_waits_ends_the_receiving_without_an_error(
    tmp_path: Path,
) -> None:
    """vLLM closes it in another thread when its core has died."""
    import zmq
    import zmq.asyncio

    theirs, socket = zmq.Context().socket(zmq.PUSH), zmq.asyncio.Context().socket(zmq.PULL)
    socket.bind(f"ipc://{tmp_path}/core")
    theirs.connect(f"ipc://{tmp_path}/core")
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, failure: failures.append(failure))
    steps = SimpleNamespace(take=lambda frames, more: True, busy=False)
    resources = SimpleNamespace(output_socket=socket, output_queue_task=None)
    async with asyncio.TaskGroup() as tasks:

        def begin() -> None:
            message = resources.output_socket.recv_multipart(copy=False)
            resources.output_queue_task = tasks.create_task(message)

        receive_faster(SimpleNamespace(resources=resources, _ensure_output_queue_task=begin), steps)
        theirs.send_multipart([b"one"])
        plain = zmq.Socket.shadow(socket)
        assert plain.poll(30_000)
        plain.close(linger=0)  # the loop has not seen the message
        await asyncio.sleep(0.05)
        steps.resume()
        resources.output_queue_task.cancel()
    assert not failures
    theirs.close(linger=0)
