"""The response cache and the limits of fallback legs in whole journeys."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from accounting.prices import Price
from adapters.values import Adapter
from gateway.backends.port import BackendState, Completion, Continue, DeltaSink, Work
from gateway.contracts.events import Delta, Reasoning, ToolArgs, ToolBegin, ToolEnd
from gateway.contracts.values import Caller, CallerRole, FinishReason, GenerateRequest
from resilience.failures import BackendFailure, FailureKind
from resilience.leg_limits import LegLimit, LegSkipped
from resilience.response_cache_memory import MemoryStore
from resilience.response_cache_values import StoredAnswer
from tests.journey.rig import JourneyRig, RestartingBackend
from tests.resilience.words_embedder import WordsEmbedder
from tests.scripted import Script, ScriptedBackend
from tests.virtual_time import loop_time, virtual_time

Build = Callable[..., JourneyRig]
Ask = Callable[..., GenerateRequest]
CACHED = {"fallback": ["response_cache", "degraded"]}
COST = Price(10**9, 10**9, 10**9).cost_nanousd


async def test_the_same_question_is_answered_without_a_warning(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(route=CACHED)
    await rig.run(ask("Who created Berserk?"))
    rig.backends["local"].state = BackendState.DEAD
    answer = (await rig.run(ask("Who created Berserk?", generation_id="gen_2"))).answer
    assert answer is not None and answer.fallback is not None
    assert (answer.fallback.kind, answer.warnings) == ("response_cache", ())


async def test_a_stored_answer_of_an_adapter_names_the_adapter(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(route=CACHED, adapters=[Adapter("jp_style_v1", 1, "scripted", "adapters/jp")])
    first = (await rig.run(ask("Who created Berserk?", adapter_id="jp_style_v1"))).answer
    rig.backends["local"].state = BackendState.DEAD
    again = ask("Who created Berserk?", adapter_id="jp_style_v1", generation_id="gen_2")
    answer = (await rig.run(again)).answer
    assert first is not None and answer is not None and answer.backend == "response_cache"
    assert answer.backend_version == first.backend_version == "scripted+jp_style_v1"
    assert answer.model == first.model == "jp_style_v1"
    other = ask("Who created Vagabond?", adapter_id="jp_style_v1", generation_id="gen_3")
    degraded = (await rig.run(other)).answer
    assert degraded is not None and degraded.backend_version == "scripted", "no adapter wrote that text"


class RemoteStore(MemoryStore):
    """A store that answers in a later turn of the event loop."""

    async def get(self, key: str) -> StoredAnswer | None:
        await asyncio.sleep(0)
        return await super().get(key)


@virtual_time
async def test_a_wait_that_passes_the_deadline_leaves_time_for_the_stored_answer(
    build_rig: Build, ask: Ask
) -> None:
    local = RestartingBackend("local")
    local.restart_s, local.waited_for = 30.0, asyncio.Event()
    rig = build_rig(backends=[local], route=CACHED)
    rig.cache.store = RemoteStore(capacity=10, max_bytes=1 << 20, ttl_s=60.0, clock=loop_time)
    await rig.run(ask("Who created Berserk?"))
    local.state, local.ready_in_s = BackendState.STARTING, 0.01
    late = ask("Who created Berserk?", generation_id="gen_2", deadline=loop_time() + 1.0)
    answer = (await rig.run(late)).answer
    assert local.waited_for.is_set()
    assert answer is not None and answer.fallback is not None
    assert answer.fallback.kind == "response_cache"


SIMILAR = {**CACHED, "response_cache": {"similar": {"model": "words", "threshold": 0.6}}}


async def test_a_similar_question_is_answered_with_a_warning_that_says_how_similar(
    build_rig: Build, ask: Ask
) -> None:
    rig = build_rig(route=SIMILAR)
    rig.cache.embedder = WordsEmbedder()
    first = (await rig.run(ask("Who created Berserk?"))).answer
    rig.backends["local"].state = BackendState.DEAD
    answer = (await rig.run(ask("Who made Berserk?", generation_id="gen_2"))).answer
    assert first is not None and answer is not None and answer.fallback is not None
    assert (answer.fallback.kind, answer.output_text) == ("response_cache", first.output_text)
    assert answer.warnings == ("answered from a similar question (0.67)",)


@pytest.mark.parametrize(
    ("first", "then", "change"),
    [
        ("Who created Berserk?", "Who made Berserk?", {"caller": Caller("globex", CallerRole.CALLER, "k2")}),
        ("Who created Berserk?", "Who made Berserk?", {"context": {"customer": "Petra"}}),
        ("Who created Berserk?", "Who made Berserk?", {"locale": "ja"}),
        ("Where is order 12?", "Where is order 13?", {}),
        ("Who created Berserk?", "What does shipping cost?", {}),
    ],
)
async def test_no_similarity_crosses_tenants_contexts_locales_and_numbers(
    build_rig: Build, ask: Ask, first: str, then: str, change: dict[str, object]
) -> None:
    rig = build_rig(route=SIMILAR)
    rig.cache.embedder = WordsEmbedder()
    await rig.run(ask(first))
    rig.backends["local"].state = BackendState.DEAD
    answer = (await rig.run(ask(then, generation_id="gen_2", **change))).answer
    assert answer is not None and answer.finish_reason is FinishReason.DEGRADED


async def test_a_route_without_a_model_embeds_nothing(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(route=CACHED)
    rig.cache.embedder = embedder = WordsEmbedder()
    await rig.run(ask("Who created Berserk?"))
    rig.backends["local"].state = BackendState.DEAD
    await rig.run(ask("Who made Berserk?", generation_id="gen_2"))
    assert embedder.calls == []


@pytest.mark.parametrize(
    "change",
    [
        {"caller": Caller("globex", CallerRole.CALLER, "key_2")},
        {"context": {"customer": "Petra"}},
        {"locale": "ja"},
    ],
)
async def test_another_tenant_context_or_locale_gets_no_stored_answer(
    build_rig: Build, ask: Ask, change: dict[str, object]
) -> None:
    rig = build_rig(route=CACHED)
    await rig.run(ask("Who created Berserk?"))
    rig.backends["local"].state = BackendState.DEAD
    answer = (await rig.run(ask("Who created Berserk?", **change))).answer
    assert answer is not None and answer.finish_reason is FinishReason.DEGRADED


async def test_an_answer_from_the_cache_is_not_kept_again(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(route=CACHED)
    await rig.run(ask("Who created Berserk?"))
    rig.backends["local"].state = BackendState.DEAD
    await rig.run(ask("Who created Berserk?", generation_id="gen_2"))
    figures = rig.cache.store.figures()
    assert figures is not None and figures.entries == 1


async def test_a_leg_at_its_limit_of_spending_is_passed_over(build_rig: Build, ask: Ask) -> None:
    dead = ScriptedBackend("local", state=BackendState.DEAD)
    pool = ScriptedBackend("pool")
    rig = build_rig(
        backends=[dead, pool],
        route={"fallback": ["pool", "degraded"]},
        legs={"pool": LegLimit(max_spend_nanousd_per_minute=1, cost=COST)},
    )
    answer = (await rig.run(ask())).answer
    assert answer is not None and answer.finish_reason is FinishReason.DEGRADED
    assert pool.calls == [] and rig.skipped == [LegSkipped("pool", "spend")]
    assert rig.in_use() == []


async def test_a_leg_is_charged_for_the_tokens_that_it_used(build_rig: Build, ask: Ask) -> None:
    dead = ScriptedBackend("local", state=BackendState.DEAD)
    rig = build_rig(
        backends=[dead, ScriptedBackend("pool")],
        route={"fallback": ["pool", "degraded"]},
        legs={"pool": LegLimit(max_spend_nanousd_per_minute=10**12, cost=COST)},
    )
    answer = (await rig.run(ask())).answer
    assert answer is not None and answer.backend_name == "pool"
    tokens = answer.usage.input_tokens + answer.usage.output_tokens
    figures = rig.limits.figures()["pool"]
    assert (figures.in_use, figures.reserved_nanousd, figures.spent_nanousd) == (0, 0, tokens * 1000)


@pytest.mark.parametrize("kind", [FailureKind.THROTTLED, FailureKind.TOKEN_LIMIT_EXCEEDED])
@pytest.mark.parametrize("pieces", [(), ("Kentaro",)])
async def test_a_leg_that_refuses_costs_nothing_and_one_that_breaks_off_its_reservation(
    build_rig: Build, ask: Ask, kind: FailureKind, pieces: tuple[str, ...]
) -> None:
    dead = ScriptedBackend("local", state=BackendState.DEAD)
    failing = Script(pieces, failure=BackendFailure(kind, "no"))
    rig = build_rig(
        backends=[dead, ScriptedBackend("pool", scripts=[failing])],
        route={"fallback": ["pool", "degraded"]},
        legs={"pool": LegLimit(max_spend_nanousd_per_minute=10**12, cost=COST)},
    )
    answer = (await rig.run(ask())).answer
    assert answer is not None and answer.finish_reason is FinishReason.DEGRADED
    assert (rig.limits.figures()["pool"].spent_nanousd > 0) is bool(pieces)


async def test_a_leg_is_charged_for_the_prompt_as_its_own_tokenizer_counts_it(
    build_rig: Build, ask: Ask
) -> None:
    class OwnCount(ScriptedBackend):
        async def generate(self, work: Work, out: DeltaSink) -> Completion:
            completion = await super().generate(work, out)
            return replace(completion, usage=replace(completion.usage, input_tokens=1000))

    rig = build_rig(
        backends=[ScriptedBackend("local", state=BackendState.DEAD), OwnCount("pool")],
        route={"fallback": ["pool", "degraded"]},
        legs={"pool": LegLimit(max_spend_nanousd_per_minute=10**12, cost=COST)},
    )
    answer = (await rig.run(ask())).answer
    assert answer is not None and answer.usage.input_tokens == 1000
    assert rig.limits.figures()["pool"].spent_nanousd == (1000 + answer.usage.output_tokens) * 1000


async def test_a_leg_that_resumes_an_answer_is_charged_for_the_part_as_input(
    build_rig: Build, ask: Ask
) -> None:
    broken = Script(failure=BackendFailure(FailureKind.STREAM_BROKEN, "cut"), breaks_after=2)
    rig = build_rig(
        backends=[
            ScriptedBackend("local", scripts=[broken]),
            ScriptedBackend("pool", continues=frozenset({Continue.TEXT})),
        ],
        route={"fallback": ["pool"]},
        legs={"pool": LegLimit(max_spend_nanousd_per_minute=10**12, cost=COST)},
    )
    answer = (await rig.run(ask(stream=True))).answer
    assert answer is not None and answer.backend_name == "pool" and answer.usage.output_tokens == 3
    # The prompt and the part of two tokens, and one new token.
    assert rig.limits.figures()["pool"].spent_nanousd == (answer.usage.input_tokens + 2 + 1) * 1000


async def test_the_primary_backend_has_no_leg_limit(build_rig: Build, ask: Ask) -> None:
    rig = build_rig(legs={"local": LegLimit(max_spend_nanousd_per_minute=1, cost=COST)})
    answer = (await rig.run(ask())).answer
    assert answer is not None and answer.backend_name == "local" and rig.skipped == []


async def test_a_stored_answer_has_its_reasoning_again(build_rig: Build, ask: Ask) -> None:
    script = Script(events=(Reasoning("Hm.", 1), Delta("Kentaro Miura.", 1)))
    rig = build_rig(backends=[ScriptedBackend("local", scripts=[script])], route=CACHED)
    await rig.run(ask())
    rig.backends["local"].state = BackendState.DEAD
    sink = await rig.run(ask(generation_id="gen_2", stream=True))
    assert sink.answer is not None and sink.answer.fallback is not None
    assert sink.answer.fallback.kind == "response_cache"
    assert (sink.answer.reasoning, sink.answer.output_text) == ("Hm.", "Kentaro Miura.")
    assert [type(one) for one in sink.deltas] == [Reasoning, Delta]


async def test_an_answer_with_a_tool_call_is_not_kept(build_rig: Build, ask: Ask) -> None:
    call = (ToolBegin("order", 1, id="a"), ToolArgs("{}", 1), ToolEnd("", 0))
    script = Script(events=(Delta("Ordering.", 1), *call), finish_reason=FinishReason.STOP)
    rig = build_rig(backends=[ScriptedBackend("local", scripts=[script])], route=CACHED)
    await rig.run(ask())
    figures = rig.cache.store.figures()
    assert figures is not None and figures.entries == 0
