"""A request with tools is sent to a backend that supports them, or refused by name or by its key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from budgeting.values import Message, Role, Tool, ToolCall, ToolChoice, ToolChoiceMode
from gateway.contracts.features import KNOWN_FEATURES, Feature
from gateway.contracts.values import Contract, GenerateRequest
from tests.journey.rig import CALLER, JourneyRig
from tests.scripted import ScriptedBackend

Build = Callable[..., JourneyRig]
Ask = Callable[..., GenerateRequest]

STOCK = Tool("stock", parameters='{"type":"object"}')
ASKED = {
    "tools": (STOCK,),
    "tool_choice": ToolChoice(ToolChoiceMode.REQUIRED),
    "parallel_tool_calls": False,
    "reasoning_effort": "low",
    "template_kwargs": {"style": "short"},
    "needs": frozenset({Feature.TOOLS}),
}


async def test_tools_reach_a_backend_that_knows_them_and_others_are_passed_over(
    build_rig: Build, ask: Ask
) -> None:
    unable = ScriptedBackend("local", features=KNOWN_FEATURES)
    able = ScriptedBackend("spare", features=KNOWN_FEATURES | {Feature.TOOLS})
    weights = [{"name": "local", "weight": 60}, {"name": "spare", "weight": 40}]
    rig = build_rig(backends=[unable, able], route={"backends": weights})
    talk = (
        Message(Role.USER, "Is it there?"),
        Message(Role.ASSISTANT, "", (ToolCall("c", "stock", "{}"),)),
        Message(Role.TOOL, "3", tool_call_id="c"),
    )
    sink = await rig.run(ask(messages=talk, contract=Contract.CHAT, **ASKED))
    assert sink.answer is not None and sink.answer.backend_name == "spare"
    [work] = able.calls
    assert not unable.calls
    assert (work.tools, work.tool_choice, work.parallel_tool_calls) == (
        ASKED["tools"],
        ASKED["tool_choice"],
        False,
    )
    assert (work.reasoning_effort, work.template_kwargs) == ("low", {"style": "short"})
    assert work.messages == talk


async def test_where_no_backend_knows_tools_the_field_is_named(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(backends=[ScriptedBackend("local", features=KNOWN_FEATURES)])
    for contract in (Contract.CHAT, Contract.NATIVE):
        sink = await rig.run(ask(contract=contract, **ASKED))
        assert sink.error is not None and (sink.error.status, sink.error.param) == (422, "tools")


async def test_a_key_may_be_barred_from_tools(build_rig: Build, ask: Ask) -> None:
    rig = build_rig()
    barred = replace(CALLER, tools=False)
    sink = await rig.run(ask(caller=barred, **ASKED))
    assert sink.error is not None
    assert (sink.error.status, sink.error.code, sink.error.param) == (403, "forbidden", "tools")
    assert not rig.outbox.rows
    assert (await rig.run(ask(caller=barred))).answer is not None
    assert (await rig.run(ask(**ASKED))).answer is not None
