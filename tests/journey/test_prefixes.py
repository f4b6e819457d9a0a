"""What a journey reports of a request's stable prefix and of the volatile content in it."""

from __future__ import annotations

from collections.abc import Callable

from budgeting.values import Message, Role
from gateway.contracts.values import Contract, GenerateRequest
from resilience.failures import BackendFailure, FailureKind
from tests.journey.rig import JourneyRig
from tests.scripted import Script, ScriptedBackend

Build = Callable[..., JourneyRig]
Ask = Callable[..., GenerateRequest]

ROUTE = {"prompt_version": "chat-manga-2.1"}


def stamped(at: str) -> tuple[Message, ...]:
    return (Message(Role.SYSTEM, f"Be brief. It is {at} now."), Message(Role.USER, "hi"))


async def test_a_prefix_is_expected_once_it_was_computed(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(Script(cached_tokens=0), Script(cached_tokens=1_000), route=ROUTE)
    for at in ("10:00:01", "10:00:02"):
        await rig.run(ask(messages=stamped(at), generation_id=f"gen_{at}"))
    first, second = rig.records
    assert first.prefix_fingerprint == second.prefix_fingerprint is not None
    assert first.prefix_tokens == second.prefix_tokens
    assert first.prefix_tokens is not None and first.prefix_tokens % 16 == 0
    assert (first.prefix_expected_tokens, first.prefix_cached_tokens) == (0, 0)
    assert second.prefix_expected_tokens == second.prefix_cached_tokens == second.prefix_tokens


async def test_the_answer_and_the_record_report_moved_content_without_its_words(
    build_rig: Build, ask: Ask
) -> None:
    rig = build_rig(route=ROUTE)
    answer = (await rig.run(ask(messages=stamped("10:00:01")))).answer
    assert answer is not None
    assert answer.warnings == (
        "volatile content in system messages (time) was moved behind the prefix that requests share; "
        "send it in context",
    )
    [record] = rig.records
    assert (record.volatile, record.volatile_action) == (("time",), "moved")
    assert "10:00:01" not in repr(record)
    [work] = rig.backends["local"].calls
    assert [message.content for message in work.messages][1:3] == [
        "Be brief.",
        "Context:\nIt is 10:00:01 now.",
    ]


async def test_openais_contract_reports_and_sends_what_was_written(build_rig: Build, ask: Ask) -> None:
    rig = build_rig()
    asked = ask(messages=stamped("10:00:01"), contract=Contract.CHAT, model="scripted")
    answer = (await rig.run(asked)).answer
    assert answer is not None
    [warning] = answer.warnings
    assert "(time) shortens" in warning and "sluice.context" in warning
    assert (rig.records[0].volatile, rig.records[0].volatile_action) == (("time",), "reported")
    [work] = rig.backends["local"].calls
    assert work.messages == stamped("10:00:01")


async def test_a_request_without_anything_volatile_has_no_warning(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(route=ROUTE)
    answer = (await rig.run(ask())).answer
    assert answer is not None and answer.warnings == ()
    assert (rig.records[0].volatile, rig.records[0].volatile_action) == (None, None)


async def test_the_answer_of_a_fallback_reports_nothing_about_the_cache_of_the_first_backend(
    build_rig: Build, ask: Ask
) -> None:
    broken = ScriptedBackend(
        scripts=(Script(pieces=(), failure=BackendFailure(FailureKind.ENGINE_DEAD, "x")),)
    )
    spare = ScriptedBackend("spare")
    rig = build_rig(backends=[broken, spare], route={**ROUTE, "fallback": ["spare"]})
    answer = (await rig.run(ask())).answer
    assert answer is not None and answer.backend_name == "spare"
    [record] = rig.records
    assert record.prefix_fingerprint is not None
    assert record.prefix_tokens is record.prefix_expected_tokens is record.prefix_cached_tokens is None


async def test_a_raw_prompt_has_no_stable_prefix(build_rig: Build, ask: Ask) -> None:
    rig = build_rig()
    await rig.run(ask(messages=(), raw_prompt="Once", contract=Contract.COMPLETIONS, model="scripted"))
    assert rig.records[0].prefix_fingerprint is None
