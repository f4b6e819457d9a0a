"""The steps of vLLM's core: texts that are passed on at once, and what vLLM's own path handles."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gateway.backends.vllm.compat.answer import Outputs
from gateway.backends.vllm.compat.signals import SignalBoard
from gateway.backends.vllm.compat.steps import CoreSteps
from tests.vllm.conftest import needs_vllm

pytestmark = needs_vllm

MODEL = Path(__file__).parents[2] / "models" / "demo"
TEXT = "Volume 3 of the series ships on Monday: 本は来週届きます。"


class StepRig:
    """One request in vLLM's own output processor, its steps, and the texts and tokens that were taken."""

    def __init__(self, **sampling: Any) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.tokenizers import get_tokenizer
        from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
        from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        tokenizer = get_tokenizer(str(MODEL))
        self.ids: list[int] = tokenizer.encode(TEXT, add_special_tokens=False)
        self.processor = OutputProcessor(tokenizer, log_stats=True)
        self.client = SimpleNamespace(
            outputs_queue=asyncio.Queue(), decoder=MsgpackDecoder(EngineCoreOutputs)
        )
        self._encode = MsgpackEncoder().encode
        self.board, self.steps_seen = SignalBoard(self._stepped), 0
        llm = SimpleNamespace(engine_core=self.client, output_processor=self.processor)
        self.steps = CoreSteps(llm, self.board)
        params = SamplingParams(output_kind=RequestOutputKind.DELTA, max_tokens=1000, **sampling)
        self.collector = RequestOutputCollector(params.output_kind, "r")
        request = EngineCoreRequest(
            "r", self.ids[:2], None, params, None, 0.0, None, None, None, external_req_id="r"
        )
        self.processor.add_request(request, None, None, 0, self.collector)
        self.outputs = Outputs(self.collector, self.steps.up_to_date)
        self.steps.add(self.outputs)
        self.taken: list[tuple[str, list[int]]] = []
        self.by_vllm = 0

    def _stepped(self, preemptions: int) -> None:
        self.steps_seen += 1

    def _take(self, given: Any) -> bool:
        if isinstance(given, tuple):
            self.taken.append((given[0], list(given[1])))
            return True
        self.by_vllm += 1
        self.taken.append((given.outputs[0].text, list(given.outputs[0].token_ids)))
        return not given.finished

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """vLLM's task handles the steps that are left to it, and the request's task awaits its outputs."""

        async def handler() -> None:
            from vllm.v1.metrics.stats import IterationStats

            while True:
                step = await self.client.outputs_queue.get()
                stats = IterationStats()
                self.processor.process_outputs(step.outputs, step.timestamp, stats)

        async with asyncio.TaskGroup() as tasks:
            both = [
                tasks.create_task(handler()),
                tasks.create_task(self.outputs.pass_on(self._take)),
            ]
            await asyncio.sleep(0)
            yield
            for task in both:
                task.cancel()

    def step(self, *tokens: int, more: bool = False, **fields: Any) -> bool:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
        from vllm.v1.metrics.stats import SchedulerStats

        output = EngineCoreOutput("r", list(tokens), **fields)
        stats = SchedulerStats(num_running_reqs=1, kv_cache_usage=0.25)
        return self.send(EngineCoreOutputs(outputs=[output], scheduler_stats=stats), more)

    def send(self, message: Any, more: bool = False) -> bool:
        import zmq

        return self.steps.take([zmq.Frame(bytes(part)) for part in self._encode(message)], more)

    async def first(self) -> None:
        """The answer's first token, which vLLM handles."""
        self.step(self.ids[0])
        assert self.steps.busy
        await asyncio.sleep(0)
        assert not self.steps.busy and self.by_vllm == 1

    def text(self) -> str:
        return "".join(text for text, _ in self.taken)


async def test_a_text_is_passed_on_by_the_call_that_receives_its_token() -> None:
    rig = StepRig()
    async with rig.running():
        await rig.first()
        for token in rig.ids[1:]:
            assert rig.step(token)
            assert rig.taken[-1][1] == [token] and not rig.collector.ready.is_set()
    assert rig.text() == TEXT and rig.by_vllm == 1
    state = rig.processor.request_states["r"]
    assert state.detokenizer.output_token_ids == rig.ids
    assert state.stats.num_generation_tokens == len(rig.ids)
    assert rig.steps_seen == len(rig.ids) - 1


async def test_the_last_text_is_the_rest_whoever_handled_those_before() -> None:
    from vllm.v1.engine import FinishReason

    rig = StepRig()
    async with rig.running():
        await rig.first()
        for token in rig.ids[1:-1]:
            rig.step(token)
        rig.step(rig.ids[-1], finish_reason=FinishReason.LENGTH)
        await asyncio.sleep(0)
    assert rig.text() == TEXT and rig.by_vllm == 2
    assert [token for _, ids in rig.taken for token in ids] == rig.ids
    assert "r" not in rig.processor.request_states


async def test_the_texts_of_steps_that_have_arrived_together_are_one() -> None:
    rig = StepRig()
    async with rig.running():
        await rig.first()
        rig.step(rig.ids[1], more=True)
        rig.step(rig.ids[2], more=True)
        assert len(rig.taken) == 1
        rig.step(rig.ids[3])
        assert [ids for _, ids in rig.taken] == [rig.ids[:1], rig.ids[1:4]]


async def test_a_held_text_is_passed_on_before_a_message_that_has_none() -> None:
    from vllm.v1.engine import EngineCoreOutputs, UtilityOutput

    rig = StepRig()
    async with rig.running():
        await rig.first()
        rig.step(rig.ids[1], more=True)
        assert not rig.send(EngineCoreOutputs(utility_output=UtilityOutput(7)))
        assert [ids for _, ids in rig.taken] == [rig.ids[:1], rig.ids[1:2]]


async def test_vllm_handles_log_probabilities_stop_strings_and_faults() -> None:
    rig = StepRig(stop=["never"])
    async with rig.running():
        await rig.first()
        rig.step(rig.ids[1])
        await asyncio.sleep(0)
        assert rig.by_vllm == 2
    rig = StepRig()
    async with rig.running():
        await rig.first()
        rig.step(rig.ids[1], num_nans_in_logits=1)
        await asyncio.sleep(0)
        assert rig.by_vllm == 2


async def test_an_output_that_nobody_can_take_now_waits_with_those_before_it() -> None:
    rig = StepRig()
    async with rig.running():
        await rig.first()
        rig.outputs.taker = None  # the request's task awaits a slow reader
        for token in rig.ids[1:3]:
            rig.step(token)
            await asyncio.sleep(0)
        assert len(rig.taken) == 1 and rig.collector.output.outputs[0].token_ids == rig.ids[1:3]


async def test_an_unexpected_error_reaches_the_task_that_fails_all_requests() -> None:
    rig = StepRig()
    async with rig.running():
        await rig.first()
        rig.processor.request_states["r"].detokenizer.decode_next = None
        assert rig.step(rig.ids[1]) and rig.steps.busy
        assert isinstance(rig.client.outputs_queue.get_nowait(), TypeError)


async def test_with_a_queue_of_another_kind_vllm_handles_all() -> None:
    from vllm.v1.engine import EngineCoreOutputs

    rig = StepRig()
    client = SimpleNamespace(outputs_queue=asyncio.LifoQueue(), decoder=rig.client.decoder)
    llm = SimpleNamespace(engine_core=client, output_processor=rig.processor)
    steps = CoreSteps(llm, rig.board)
    rig.steps = steps
    assert not rig.send(EngineCoreOutputs()) and not steps.busy


async def test_the_figures_of_a_step_are_recorded_whoever_handles_it() -> None:
    rig = StepRig()
    async with rig.running():
        await rig.first()
        assert rig.steps_seen == 0  # vLLM's task calls the logger, which this one lacks
        rig.step(rig.ids[1])
    assert rig.steps_seen == 1 and rig.board.reported == (1, 0, 0.25)


async def test_a_message_that_is_no_step_is_left_to_vllm() -> None:
    import zmq

    rig = StepRig()
    async with rig.running():
        await rig.first()
        rig.step(rig.ids[1], more=True)
        dead = [zmq.Frame(b"ENGINE_CORE_DEAD")]
        assert not rig.steps.take(dead, False) and not rig.steps.busy
        assert [ids for _, ids in rig.taken] == [rig.ids[:1], rig.ids[1:2]]
