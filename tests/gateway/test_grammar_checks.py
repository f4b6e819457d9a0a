"""Grammars are checked in a process that is killed over its bounds; a tenant waits only for its own."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import nullcontext
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from benchmarks.grammar_bombs import HOSTILE, verdict
from benchmarks.ordinary_shapes import ORDINARY
from budgeting.values import Tool, ToolChoice, ToolChoiceMode, ToolKind
from gateway.contracts.values import (
    Caller,
    CallerRole,
    Contract,
    FormatType,
    GenerateRequest,
    ResponseFormat,
)
from gateway.errors import BackendUnavailable, DeadlineExceeded, GrammarTooComplex, InvalidRequest
from gateway.generation.grammars import MAX_WAITING_PER_TENANT, WORK, GrammarChecks
from gateway.limited.process import LimitedProcess, Limits, NoProcess
from tests.open_files import many_open_files

pytestmark = pytest.mark.slow

BOMB = json.dumps({"type": "integer", "multipleOf": 999_979})
# Longer than any check on a machine five times slower, shorter than the bomb without a bound.
SOON_S = 30.0


def regex(text: str) -> ResponseFormat:
    return ResponseFormat(FormatType.REGEX, text, "guided_regex")


@pytest.fixture(scope="module")
def process() -> Iterator[LimitedProcess]:
    process = LimitedProcess(WORK, "models/demo/tokenizer.json", limits=Limits(wall_s=120.0))
    yield process
    process.close()


@pytest.fixture
def checks(process: LimitedProcess) -> GrammarChecks:
    return GrammarChecks(process)


def server_of(process: LimitedProcess) -> psutil.Process:
    assert process._server is not None
    return psutil.Process(process._server.pid)


async def test_a_gateway_with_many_connections_checks_shapes() -> None:
    process = LimitedProcess(WORK, "models/demo/tokenizer.json", limits=Limits(wall_s=120.0))
    try:
        with many_open_files():
            assert (await GrammarChecks(process).check(regex("[a-c]+"), "tenant")).grammar_bytes > 0
    finally:
        process.close()


async def test_every_hostile_shape_is_built_or_refused_and_leaves_no_process(
    checks: GrammarChecks, process: LimitedProcess
) -> None:
    assert len(HOSTILE) >= 40
    said = {name: await verdict(checks, shape) for name, shape in HOSTILE}
    assert {one.split(":")[0] for one in said.values()} == {
        "built",
        "400 grammar_too_complex",
        "422 invalid_request",
    }
    assert "0.5 s of processor time" in said["multipleOf"]
    assert "0.5 s of processor time" in said["lark with a schema"]
    assert "128 MiB of memory" in said["minItems of a thousand million"]
    assert server_of(process).children() == []


async def test_ordinary_shapes_are_accepted_and_tell_their_size(checks: GrammarChecks) -> None:
    assert len(ORDINARY) >= 20
    for name, shape in ORDINARY.items():
        checked = await checks.check(shape, "a")
        assert (checked, 0 < checked.grammar_bytes < 64 << 20) == (shape, True), name


async def test_a_malformed_shape_and_one_over_a_bound_name_the_field(checks: GrammarChecks) -> None:
    with pytest.raises(InvalidRequest, match=r"guided_regex .*unclosed group") as malformed:
        await checks.check(regex("(a"), "a")
    assert (malformed.value.status, malformed.value.param) == (422, "guided_regex")
    with pytest.raises(GrammarTooComplex, match=r"response_format\.json_schema is too complex: ") as bomb:
        await checks.check(ResponseFormat(FormatType.JSON_SCHEMA, BOMB, "response_format.json_schema"), "a")
    assert (bomb.value.status, bomb.value.param) == (400, "response_format.json_schema")


async def test_the_schemas_of_strict_tools_are_checked_and_others_are_not(checks: GrammarChecks) -> None:
    tools = (Tool("loose", parameters=BOMB), Tool("strict", parameters='{"type":"object"}', strict=True))
    request = a_request(tools=tools)
    checked = await checks.checked(request)
    assert replace(checked, checked_s=0.0) == request and checked.checked_s > 0.0
    bomb = Tool("bomb", parameters=BOMB, strict=True)
    with pytest.raises(GrammarTooComplex) as refused:
        await checks.checked(a_request(tools=(*tools, bomb)))
    assert refused.value.param == "tools.2.function.parameters"


@pytest.mark.parametrize(
    "choice", [ToolChoice(ToolChoiceMode.REQUIRED), ToolChoice(ToolChoiceMode.NAMED, "b")]
)
async def test_the_schemas_of_all_tools_are_bounded_if_one_must_be_called(
    checks: GrammarChecks, choice: ToolChoice
) -> None:
    tools = (Tool("a", parameters='{"type":"nonsense"}'), Tool("b"), Tool("c", ToolKind.CUSTOM, format="{}"))
    request = a_request(tools=tools, tool_choice=choice)
    assert replace(await checks.checked(request), checked_s=0.0) == request
    with pytest.raises(GrammarTooComplex) as refused:
        await checks.checked(replace(request, tools=(*tools, Tool("bomb", parameters=BOMB))))
    assert refused.value.param == "tools.3.function.parameters"


async def test_schemas_that_are_too_complex_together_are_refused_if_a_tool_must_be_called(
    checks: GrammarChecks,
) -> None:
    large = json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 50_000})
    tools = tuple(Tool(f"t{number}", parameters=large) for number in range(64))
    await checks.checked(a_request(tools=tools[:1], tool_choice=ToolChoice(ToolChoiceMode.REQUIRED)))
    with pytest.raises(GrammarTooComplex, match=r"^tools is too complex"):
        await checks.checked(a_request(tools=tools, tool_choice=ToolChoice(ToolChoiceMode.REQUIRED)))


async def test_a_loose_tool_whose_schema_cannot_be_followed_takes_any_object_and_one_without_takes_none(
    process: LimitedProcess,
) -> None:
    checks = GrammarChecks(process, binds_calls=True)
    loose = '{"properties":{"a":{"pattern":"(?=x)y","type":"string"}},"type":"object"}'
    checked = await checks.checked(a_request(tools=(Tool("loose", parameters=loose), Tool("now"))))
    assert checked.call_format is not None
    any_object, none = [line for line in checked.call_format.spec.splitlines() if "%json" in line]
    assert "properties" not in any_object and '"additionalProperties": false' in none


@pytest.mark.parametrize("compiles_calls", [False, True])
async def test_a_schema_that_is_too_complex_reaches_no_vllm_beside_an_engine_that_writes_calls_as_text(
    process: LimitedProcess, compiles_calls: bool
) -> None:
    checks = GrammarChecks(process, binds_calls=True, compiles_calls=compiles_calls)
    bomb = a_request(tools=(Tool("bomb", parameters=BOMB),))
    assert (await checks.checked(bomb)).call_format is not None, "vLLM compiles none that need not be called"
    must = replace(bomb, tool_choice=ToolChoice(ToolChoiceMode.REQUIRED))
    with pytest.raises(GrammarTooComplex) if compiles_calls else nullcontext():
        assert (await checks.checked(must)).call_format is not None


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"type": "grammar", "grammar": {"syntax": "regex", "definition": "(["}}, "the regex is not valid"),
        (
            {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: x"}},
            "the grammar is not valid",
        ),
        (
            {"type": "grammar", "grammar": {"syntax": "lark", "definition": ""}},
            "is empty; allowed: a grammar",
        ),
        (
            {"type": "grammar", "grammar": {"syntax": "gbnf", "definition": "a"}},
            "is another format; allowed: ",
        ),
        ({"type": "grammar", "grammar": "a"}, "is another format; allowed: "),
        (
            {"type": "grammar", "grammar": {"syntax": ["lark"], "definition": "a"}},
            "is another format; allowed: ",
        ),
        ({"type": None}, "is another format; allowed: "),
    ],
)
async def test_a_custom_tools_format_is_checked_by_itself(
    process: LimitedProcess, form: dict[str, object], message: str
) -> None:
    checks = GrammarChecks(process, binds_calls=True)
    tools = (Tool("now"), Tool("note", ToolKind.CUSTOM, format=json.dumps(form)))
    with pytest.raises(InvalidRequest) as refused:
        await checks.checked(a_request(tools=tools))
    assert refused.value.param == "tools.1.custom.format"
    assert refused.value.message.startswith("tools.1.custom.format ") and message in refused.value.message


def a_request(**fields: Any) -> GenerateRequest:
    caller = Caller("a", CallerRole.CALLER, "key_1")
    return GenerateRequest("req", "gen", caller, 0.0, 0, contract=Contract.CHAT, **fields)


async def test_a_cancelled_check_kills_its_process() -> None:
    process = LimitedProcess(
        WORK, "models/demo/tokenizer.json", limits=Limits(cpu_s=600.0, wall_s=600.0, memory_bytes=4 << 30)
    )
    try:
        checks = GrammarChecks(process)
        assert await checks.check(regex("a"), "a") == regex("a")
        server = server_of(process)
        async with asyncio.TaskGroup() as group:
            call = group.create_task(checks.check(ResponseFormat(FormatType.JSON_SCHEMA, BOMB), "a"))
            await until(lambda: any(child.cpu_times().user > 0.2 for child in server.children()))
            call.cancel()
        assert call.cancelled()
        await until(lambda: not server.children())
    finally:
        process.close()


async def test_a_check_that_the_machine_has_no_time_for_names_its_field_and_blames_the_machine() -> None:
    limits = Limits(cpu_s=600.0, wall_s=0.5, memory_bytes=4 << 30)
    process = LimitedProcess(WORK, "models/demo/tokenizer.json", limits=limits)
    try:
        bomb = ResponseFormat(FormatType.JSON_SCHEMA, BOMB, "guided_json")
        with pytest.raises(BackendUnavailable) as refused:
            await GrammarChecks(process).check(bomb, "a")
        message = "guided_json could not be checked: the machine was too busy to finish it in time"
        assert refused.value.message == message
    finally:
        process.close()


async def test_a_server_that_died_is_started_again(checks: GrammarChecks, process: LimitedProcess) -> None:
    await checks.check(regex("ab"), "a")
    killed = server_of(process)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait(SOON_S)
    try:
        await checks.check(regex("abc"), "a")
    except BackendUnavailable:  # the job was handed to the dying server
        await checks.check(regex("abc"), "a")
    assert server_of(process).pid != killed.pid


async def test_a_server_that_something_has_stopped_blocks_nobody_and_is_replaced() -> None:
    process = LimitedProcess(WORK, "models/demo/tokenizer.json", limits=Limits(wall_s=SOON_S))
    job = b'["regex","a"]'
    try:
        assert b"bytes" in await process.run(job)
        stopped = server_of(process)
        stopped.suspend()
        began_at = time.monotonic()
        for _ in range(1_000):  # more than its socket holds
            async with asyncio.TaskGroup() as group:
                left = group.create_task(process.run(job))
                await asyncio.sleep(0)
                left.cancel()
            if server_of(process) != stopped:
                break
        assert server_of(process) != stopped and time.monotonic() - began_at < SOON_S
        assert b"bytes" in await process.run(job)
    finally:
        process.close()


@pytest.mark.parametrize("blocking", [True, False])
async def test_a_server_that_does_not_answer_in_time_is_replaced(blocking: bool) -> None:
    process = LimitedProcess(WORK, "models/demo/tokenizer.json", limits=Limits(wall_s=120.0))
    job = b'["regex","a"]'
    try:
        assert b"bytes" in await process.run(job)
        stopped = server_of(process)
        stopped.suspend()
        process._longest_s = 0.2
        with pytest.raises(NoProcess, match="does not answer"):
            await (asyncio.to_thread(process.run_blocking, job) if blocking else process.run(job))
        assert not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE
        process._longest_s = SOON_S
        assert b"bytes" in await process.run(job)
    finally:
        process.close()


async def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


class Scripted(LimitedProcess):
    """A process whose answers the test sets."""

    def __init__(self) -> None:
        super().__init__("none:none", limits=Limits())
        self.asked: list[str] = []
        self.answers: dict[str, asyncio.Future[bytes]] = {}

    async def run(self, job: bytes) -> bytes:
        spec = json.loads(job)[1]
        self.asked.append(spec)
        return await self.answers.setdefault(spec, asyncio.get_running_loop().create_future())


@pytest.fixture
async def scripted() -> AsyncIterator[Scripted]:
    yield Scripted()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_one_tenants_shapes_wait_for_each_other_and_not_another_tenants(scripted: Scripted) -> None:
    checks = GrammarChecks(scripted)
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(checks.check(regex(f"a{at}"), "a")) for at in range(5)]
        await settled()
        assert scripted.asked == ["a0"]
        other = group.create_task(checks.check(regex("b"), "b"))
        await settled()
        assert scripted.asked == ["a0", "b"]
        scripted.answers["b"].set_result(b'{"bytes": 1}')
        await other
        asked[1].cancel()  # it waits in the queue and never reaches the process
        for at in (0, 2, 3, 4):
            await settled()
            scripted.answers[f"a{at}"].set_result(b'{"bytes": 1}')
    assert scripted.asked == ["a0", "b", "a2", "a3", "a4"]
    assert (await checks.check(regex("a0"), "c")).grammar_bytes == 1  # stored for every tenant
    assert checks._queues == {}


async def test_a_check_ends_at_the_callers_deadline_and_the_next_one_of_the_tenant_begins(
    scripted: Scripted,
) -> None:
    checks = GrammarChecks(scripted)
    deadline = time.monotonic() + 0.05
    async with asyncio.timeout(SOON_S), asyncio.TaskGroup() as group:
        late = [
            group.create_task(
                late_check(checks, a_request(response_format=regex(f"a{at}"), deadline=deadline))
            )
            for at in range(2)
        ]
        await settled()
        patient = group.create_task(
            checks.checked(a_request(response_format=regex("b"), deadline=deadline + 600))
        )
        messages = [await one for one in late]
        await settled()
        scripted.answers["b"].set_result(b'{"bytes": 1}')
    assert messages == 2 * [
        "the deadline passed during the check of its grammar: use a simpler one, or a later deadline"
    ]
    assert scripted.asked == ["a0", "b"] and patient.result().response_format.grammar_bytes == 1
    assert checks._queues == {}


async def late_check(checks: GrammarChecks, request: GenerateRequest) -> str:
    with pytest.raises(DeadlineExceeded) as late:
        await checks.checked(request)
    return late.value.message


async def test_a_tenant_with_too_many_waiting_is_told_to_come_again(scripted: Scripted) -> None:
    checks = GrammarChecks(scripted)
    async with asyncio.TaskGroup() as group:
        waiting = [
            group.create_task(checks.check(regex(f"a{at}"), "a")) for at in range(MAX_WAITING_PER_TENANT)
        ]
        await settled()
        with pytest.raises(BackendUnavailable) as refused:
            await checks.check(regex("one more"), "a")
        assert refused.value.retry_after_ms == 1_000
        for one in waiting:
            one.cancel()
    assert checks._queues == {}


async def test_a_check_that_failed_is_no_fault_of_the_shape_and_is_made_again(scripted: Scripted) -> None:
    checks = GrammarChecks(scripted)
    scripted.answers["a"] = asyncio.get_running_loop().create_future()
    scripted.answers["a"].set_exception(NoProcess("killed"))
    with pytest.raises(BackendUnavailable):
        await checks.check(regex("a"), "a")
    scripted.answers["a"] = asyncio.get_running_loop().create_future()
    scripted.answers["a"].set_result(b'{"bytes": 2}')
    assert (await checks.check(regex("a"), "a")).grammar_bytes == 2
