"""vLLM's outputs, on their way to the request."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.backends.vllm.compat.answer import Outputs
from tests.vllm.conftest import needs_vllm

pytestmark = needs_vllm


def output(text: str) -> Any:
    from vllm.outputs import CompletionOutput, RequestOutput

    one = CompletionOutput(0, text, [7], None, None)
    return RequestOutput("r", None, [1], None, [one], finished=False)


class World:
    """The outputs of one request, and what was taken of them; a text of ``ends`` has to be waited for."""

    def __init__(self, ends: str = "") -> None:
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.output_processor import RequestOutputCollector

        self.collector = RequestOutputCollector(RequestOutputKind.DELTA, "r")
        self.behind = False
        self.outputs = Outputs(self.collector, lambda: self.behind)
        self.taken: list[str] = []
        self._ends = ends

    def take(self, given: Any) -> bool:
        self.taken.append(given.outputs[0].text)
        return not self._ends or self.taken[-1] not in self._ends

    async def pass_on(self) -> None:
        await self.outputs.pass_on(self.take)


async def test_an_output_is_passed_on_where_it_is_put() -> None:
    world = World()
    world.collector.put(output("a"))
    async with asyncio.TaskGroup() as tasks:
        passing = tasks.create_task(world.pass_on())
        await asyncio.sleep(0)
        assert world.taken == ["a"]
        world.collector.put(output("b"))
        assert world.taken == ["a", "b"] and not world.collector.ready.is_set()
        passing.cancel()


async def test_outputs_become_one_while_others_wait_behind_them() -> None:
    world = World()
    async with asyncio.TaskGroup() as tasks:
        passing = tasks.create_task(world.pass_on())
        await asyncio.sleep(0)
        world.behind = True
        world.collector.put(output("a"))
        world.behind = False
        world.collector.put(output("b"))
        assert not world.taken
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert world.taken == ["ab"]
        world.collector.put(output("c"))
        assert world.taken == ["ab", "c"]
        passing.cancel()


async def test_what_comes_after_a_piece_that_has_to_be_waited_for_is_taken_next() -> None:
    world = World(ends="a")
    async with asyncio.TaskGroup() as tasks:
        passing = tasks.create_task(world.pass_on())
        await asyncio.sleep(0)
        for text in "abc":
            world.collector.put(output(text))
        await passing
    assert world.taken == ["a"]
    async with asyncio.TaskGroup() as tasks:
        passing = tasks.create_task(world.pass_on())
        await asyncio.sleep(0)
        assert world.taken == ["a", "bc"]
        passing.cancel()


async def test_an_error_comes_after_what_was_put_before_it() -> None:
    world = World()
    failure: Exception | None = None

    async def passed_on() -> None:
        nonlocal failure
        try:
            await world.pass_on()
        except ValueError as error:
            failure = error

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(passed_on())
        await asyncio.sleep(0)
        world.collector.put(output("a"))
        world.collector.put(ValueError("the engine is dead"))
    assert world.taken == ["a"] and str(failure) == "the engine is dead"
