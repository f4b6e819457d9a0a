"""Behaviour of vLLM in process that the port's conformance suite does not test."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from adapters.values import Adapter
from budgeting.values import Tool, ToolChoice, ToolChoiceMode
from gateway.contracts.events import AnswerFold, Delta
from gateway.contracts.features import KNOWN_FEATURES, Feature
from gateway.contracts.values import FinishReason, FormatType
from resilience.failures import BackendFailure, FailureKind
from tests.conformance.harness import DEMO_MODEL, MAX_LORA_RANK, Specimen, collect, shaped
from tests.conformance.specimens import embedded
from tests.engine.adapters import write_adapter
from tests.vllm.conftest import needs_vllm
from tests.vllm.test_demo_model import assert_same_up_to_a_tie

pytestmark = [pytest.mark.asyncio(loop_scope="session"), *needs_vllm]

QUESTION = "LogSender me about a manga with a dragon, at length."
NEVER_END = {2: -100.0}


async def test_greedy_answers_are_those_of_the_embedded_engine(vllm: Specimen, tmp_path: Path) -> None:
    rng = random.Random(20)
    lengths = (1, 2, 15, 16, 17, 31, 32, 33, 64, 100, 257)
    prompts = [tuple(rng.randrange(300, 1900) for _ in range(length)) for length in lengths]
    vocabulary = json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"]
    ids = {vllm.tokenizer.token_bytes(token): token for token in range(vocabulary)}
    async with embedded(tmp_path) as other:
        same = 0
        for prompt in prompts:
            work = replace(vllm.work("", max_tokens=24, logprobs=0), token_ids=prompt)
            here, there = await collect(vllm.backend, work), await collect(other.backend, work)
            said = [[ids[entry.data] for entry in answer.logprobs()] for answer in (here, there)]
            assert_same_up_to_a_tie(list(prompt), *said)
            same += here.text == there.text
    assert same >= len(prompts) - 2


async def test_the_first_delta_tells_what_was_cached_and_how_long_it_waited(vllm: Specimen) -> None:
    work = vllm.work("volume " * 200, max_tokens=4, cache_salt="first-delta")
    await collect(vllm.backend, work)
    answer = await collect(vllm.backend, replace(work, generation_id="again"))
    first, *others = answer.deltas
    assert first.cached_tokens == answer.completion.usage.cached_tokens >= 4 * vllm.block_size
    assert first.queue_wait_s == answer.completion.queue_wait_s >= 0
    assert all(delta.cached_tokens is None and delta.queue_wait_s is None for delta in others)


async def test_without_a_salt_every_caller_shares(vllm: Specimen) -> None:
    work = vllm.work("chapter " * 200, max_tokens=2, cache_salt=None)
    await collect(vllm.backend, work)
    again = await collect(vllm.backend, replace(work, generation_id="shared"))
    assert again.completion.usage.cached_tokens > 0


async def test_higher_priority_goes_first_when_the_batch_is_full(vllm: Specimen) -> None:
    """The batch takes 32; of the waiting requests, the urgent ones start first though they came last."""
    order: list[int] = []
    full = asyncio.Event()

    async def ask(priority: int, number: int, tokens: int) -> None:
        seen = False

        async def out(delta: Delta) -> None:
            nonlocal seen
            if not seen:
                order.append(priority)
                if len(order) == 32:
                    full.set()
            seen = True

        await vllm.backend.generate(
            vllm.work(f"{QUESTION} {number}", max_tokens=tokens, priority=priority, logit_bias=NEVER_END), out
        )

    async with asyncio.TaskGroup() as group:
        long = [group.create_task(ask(5, number, 200)) for number in range(32)]
        await full.wait()
        short = [group.create_task(ask(-1, 100 + number, 2)) for number in range(4)]
        await asyncio.sleep(0.05)
        short += [group.create_task(ask(1, 200 + number, 2)) for number in range(4)]
        await asyncio.sleep(0.05)
        long[0].cancel()  # its place serves all that wait, one after the other
        await asyncio.gather(*short)
        for task in long:
            task.cancel()
    waited = [priority for priority in order if priority != 5]
    assert waited == [1] * 4 + [-1] * 4


@pytest.mark.parametrize(("seed", "n"), [(2**63 - 1, 1), (2**63 - 2, 2), (-(2**63), 2), (0, 2)])
async def test_vllm_samples_with_every_seed_that_the_gateway_accepts(
    vllm: Specimen, seed: int, n: int
) -> None:
    work = vllm.work(QUESTION, n=n, temperature=1.0, seed=seed, max_tokens=8)
    assert (await collect(vllm.backend, work)).completion.usage.output_tokens > 0


async def test_more_seeded_prompts_than_a_step_holds_are_all_answered(vllm: Specimen) -> None:
    works = [
        replace(
            vllm.work(QUESTION, temperature=1.0, seed=number, max_tokens=2), token_ids=(5 + number,) * 1000
        )
        for number in range(12)
    ]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(collect(vllm.backend, work)) for work in works]
    assert all(task.result().tokens for task in tasks)


async def test_a_top_k_beyond_the_vocabulary_takes_all_of_it(vllm: Specimen) -> None:
    work = vllm.work(QUESTION, temperature=1.0, top_k=10**9, seed=1, max_tokens=4)
    assert (await collect(vllm.backend, work)).tokens == 4


async def test_a_token_outside_the_vocabulary_is_bad_input_and_harms_nobody(vllm: Specimen) -> None:
    work = replace(vllm.work("Hello"), token_ids=(5, 10**6))
    with pytest.raises(BackendFailure) as caught:
        await collect(vllm.backend, work)
    assert caught.value.kind is FailureKind.INVALID_INPUT
    await vllm.wait_idle()


async def test_an_empty_prompt_is_bad_input(vllm: Specimen) -> None:
    with pytest.raises(BackendFailure) as caught:
        await collect(vllm.backend, replace(vllm.work("Hello"), token_ids=()))
    assert caught.value.kind is FailureKind.INVALID_INPUT


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        (FormatType.JSON_SCHEMA, '{"type": "nonsense"}'),
        (FormatType.GRAMMAR, "start: ( unclosed"),
        (FormatType.REGEX, "(?P<broken"),
    ],
)
async def test_an_invalid_format_names_its_field(vllm: Specimen, kind: FormatType, spec: str) -> None:
    with pytest.raises(BackendFailure) as caught:
        await collect(vllm.backend, vllm.work("Hello", response_format=shaped(kind, spec)))
    assert caught.value.kind is FailureKind.INVALID_INPUT
    assert caught.value.param == "response_format"
    await vllm.wait_idle()


async def test_new_weights_under_an_old_name_are_used_at_once_and_find_no_old_cache(
    vllm: Specimen, tmp_path: Path
) -> None:
    def version(number: int) -> Adapter:
        folder = tmp_path / f"v{number}"
        write_adapter(folder, DEMO_MODEL, seed=40 + number, rank=MAX_LORA_RANK)
        return Adapter("styled", number, "demo", str(folder))

    first, second = await asyncio.to_thread(version, 1), await asyncio.to_thread(version, 2)
    work = vllm.work("volume " * 200, max_tokens=12, cache_salt="reload", logit_bias=NEVER_END)
    texts = []
    for adapter in (first, second, first):
        answer = await collect(vllm.backend, replace(work, adapter=adapter))
        texts.append(answer.text)
        if adapter is second:
            assert answer.completion.usage.cached_tokens == 0
    assert texts[0] == texts[2] != texts[1]


@pytest.mark.parametrize("damage", ["cut", "rank", "base"])
async def test_an_adapter_that_cannot_be_loaded_is_refused_and_the_engine_goes_on(
    vllm: Specimen, tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / damage
    rank = 4 * MAX_LORA_RANK if damage == "rank" else MAX_LORA_RANK
    await asyncio.to_thread(write_adapter, folder, DEMO_MODEL, seed=1, rank=rank)
    weights = folder / "adapter_model.safetensors"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:500])
    if damage == "base":
        (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(BackendFailure) as caught:
        await collect(vllm.backend, vllm.work("Hello", adapter=Adapter(damage, 9, "demo", str(folder))))
    assert caught.value.kind is FailureKind.MODEL_NOT_FOUND
    assert damage in str(caught.value)
    assert (await collect(vllm.backend, vllm.work("Hello", max_tokens=2))).deltas
    await vllm.wait_idle()


async def test_more_adapters_than_places_take_turns(vllm: Specimen, tmp_path: Path) -> None:
    names = [f"turn-{number}" for number in range(4)]
    for number, name in enumerate(names):
        await asyncio.to_thread(write_adapter, tmp_path / name, DEMO_MODEL, seed=number, rank=4)
    for name in names * 2:
        adapter = Adapter(name, 1, "demo", str(tmp_path / name))
        answer = await collect(vllm.backend, vllm.work(QUESTION, adapter=adapter, max_tokens=3))
        assert answer.completion.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
    await vllm.wait_idle()


async def test_a_slow_reader_gets_pieces_of_several_tokens(vllm: Specimen) -> None:
    sizes: list[int] = []

    async def out(delta: Delta) -> None:
        sizes.append(delta.tokens)
        await asyncio.sleep(0.1)

    work = vllm.work(QUESTION, max_tokens=100, logit_bias=NEVER_END)
    completion = await vllm.backend.generate(work, out)
    assert sum(sizes) == completion.usage.output_tokens == 100
    assert max(sizes) > 1
    assert len(sizes) < 100


async def test_the_engine_does_everything_that_can_be_asked(vllm: Specimen) -> None:
    assert vllm.backend.features == KNOWN_FEATURES | {Feature.TOOLS, Feature.ALLOWED_TOOLS}


WEATHER = Tool(
    "weather",
    parameters='{"type":"object","properties":{"sky":{"enum":["clear","grey"]}},"required":["sky"],'
    '"additionalProperties":false}',
)
OTHER = Tool("other", parameters='{"type":"object","properties":{},"additionalProperties":false}')


@pytest.mark.parametrize(
    ("choice", "names", "reason"),
    [
        (ToolChoice(ToolChoiceMode.REQUIRED), {"weather", "other"}, FinishReason.TOOL_CALLS),
        (ToolChoice(ToolChoiceMode.REQUIRED, allowed=("other",)), {"other"}, FinishReason.TOOL_CALLS),
        (ToolChoice(ToolChoiceMode.NAMED, "weather"), {"weather"}, FinishReason.TOOL_CALLS),
    ],
)
async def test_a_tool_that_must_be_called_is_called(
    vllm: Specimen, choice: ToolChoice, names: set[str], reason: FinishReason
) -> None:
    tools = (WEATHER, OTHER)
    work = vllm.work(
        "How is the sky?", max_tokens=200, tools=tools, tool_choice=choice, parallel_tool_calls=False
    )
    answer = await collect(vllm.backend, work)
    fold = AnswerFold()
    for delta in answer.deltas:
        fold.take(delta)
    fold.end([answer.completion.finish_reason])
    [call] = fold.tool_calls()
    assert call.name in names and answer.completion.finish_reason is reason
    expected = ({"sky": "clear"}, {"sky": "grey"}) if call.name == "weather" else ({},)
    assert json.loads(call.arguments) in expected
    assert sum(delta.tokens for delta in answer.deltas) == answer.completion.usage.output_tokens
    assert fold.text().strip() == ""
    await vllm.wait_idle()


async def test_a_tool_that_must_be_called_and_has_no_valid_schema_names_the_field(vllm: Specimen) -> None:
    tools, choice = (Tool("x", parameters='{"type":"nonsense"}'),), ToolChoice(ToolChoiceMode.REQUIRED)
    with pytest.raises(BackendFailure) as caught:
        await collect(vllm.backend, vllm.work("Hello", tools=tools, tool_choice=choice))
    assert (caught.value.kind, caught.value.param) == (FailureKind.INVALID_INPUT, "tools")
    await vllm.wait_idle()


async def test_tools_that_need_not_be_called_leave_a_text_as_it_is(vllm: Specimen) -> None:
    work = vllm.work("Hello", max_tokens=24)
    plain = await collect(vllm.backend, work)
    for mode in (ToolChoiceMode.AUTO, ToolChoiceMode.NONE):
        offered = replace(
            work, generation_id=f"offered-{mode}", tools=(WEATHER,), tool_choice=ToolChoice(mode)
        )
        answer = await collect(vllm.backend, offered)
        assert (answer.text, answer.completion.finish_reason) == (plain.text, plain.completion.finish_reason)
