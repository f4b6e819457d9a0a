"""Models with tokenizers and lengths of their own on one route: each gets a prompt that was counted for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from budgeting.counting import ChatTokenizer
from budgeting.values import CanonicalPrompt, Message, Role, SectionBudgets
from gateway.backends.port import Continue
from gateway.contracts.values import Contract, GenerateRequest, Sampling
from gateway.errors import DeadlineExceeded
from gateway.prompts.budgets import Planning, budget_request
from gateway.prompts.canonical import Canonicalizer
from gateway.prompts.text import Models, ModelText
from gateway.prompts.versions import PromptVersion
from gateway.routing.check import KnownNames
from gateway.routing.revision import make_revision
from resilience.failures import BackendFailure, FailureKind
from resilience.leg_limits import LegLimit
from tests.budgeting.folders import CHATML, byte_level, write_folder
from tests.journey.rig import JourneyRig
from tests.scripted import Script, ScriptedBackend

Build = Callable[..., JourneyRig]
Ask = Callable[..., GenerateRequest]

DEAD = Script((), failure=BackendFailure(FailureKind.ENGINE_DEAD, "gone"))
BOTH = {"backends": [{"name": "large"}], "fallback": ["small"]}
LENGTH = 512


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """A tokenizer that encodes nearly every character as a token of its own."""
    special = ["<|im_start|>", "<|im_end|>"]
    folder = write_folder(
        tmp_path_factory.mktemp("other"), byte_level(special), CHATML, eos_token="<|im_end|>"
    )
    return ChatTokenizer(folder)


@pytest.fixture
def texts(tokenizer: ChatTokenizer, other: ChatTokenizer) -> Mapping[str, ModelText]:
    return {
        "large": ModelText(tokenizer, 4096, Canonicalizer()),
        "small": ModelText(other, LENGTH, Canonicalizer(), block_size=32),
    }


@pytest.fixture
def models(texts: Mapping[str, ModelText]) -> Models:
    return Models(texts["large"], {"small": texts["small"]})


def two(*large: Script, small: tuple[Script, ...] = (Script(),), **more: object) -> list[ScriptedBackend]:
    return [
        ScriptedBackend("large", scripts=large or (Script(),), model="large", **more),  # type: ignore[arg-type]
        ScriptedBackend("small", scripts=small, model="small", **more),  # type: ignore[arg-type]
    ]


def talk(turns: int) -> tuple[Message, ...]:
    said = [
        Message((Role.USER, Role.ASSISTANT)[number % 2], f"turn {number} of ours") for number in range(turns)
    ]
    return (Message(Role.SYSTEM, "Be brief."), *said)


@pytest.mark.parametrize("model", ["large", "small"])
async def test_the_prompt_is_counted_with_the_tokenizer_of_the_model_that_answers(
    build_rig: Build, ask: Ask, models: Models, texts: Mapping[str, ModelText], model: str
) -> None:
    rig = build_rig(backends=two(), route=BOTH, models=models)
    request = ask(contract=Contract.CHAT, model=model, messages=talk(3))
    answer = (await rig.run(request)).answer
    assert answer is not None and answer.model == model
    [work] = rig.backends[model].calls
    assert work.token_ids == texts[model].encode_chat(request.messages)
    assert work.sampling.max_tokens == texts[model].max_model_len - len(work.token_ids)


async def test_a_prompt_that_fits_one_model_may_be_too_long_for_another_and_the_numbers_are_given(
    build_rig: Build, ask: Ask, models: Models
) -> None:
    rig = build_rig(backends=two(), route=BOTH, models=models)
    words = talk(101)
    assert (await rig.run(ask(contract=Contract.CHAT, model="large", messages=words))).answer is not None
    error = (await rig.run(ask(contract=Contract.CHAT, model="small", messages=words))).error
    assert error is not None and error.code == "context_too_long"
    assert str(LENGTH - 1) in error.message
    assert rig.in_use() == []


async def test_a_fallback_plans_the_prompt_for_its_own_model_and_says_what_was_cut(
    build_rig: Build, ask: Ask, models: Models, texts: Mapping[str, ModelText]
) -> None:
    route = {**BOTH, "budgets": {"recent_turns": 3000}}
    rig = build_rig(backends=two(DEAD), route=route, models=models)
    answer = (await rig.run(ask(messages=talk(101)))).answer
    assert answer is not None and (answer.model, answer.backend_name) == ("small", "small")
    [sent], [first] = rig.backends["small"].calls, rig.backends["large"].calls
    assert sent.token_ids == texts["small"].tokenizer.encode_chat(sent.messages)
    assert len(sent.messages) < len(first.messages) and sent.messages[-1] == first.messages[-1]
    assert sent.sampling.max_tokens is not None
    assert len(sent.token_ids) + sent.sampling.max_tokens <= LENGTH
    [warning] = answer.warnings
    assert "planned again for small" in warning and "more turns" in warning
    assert answer.budget.dropped_turns > 0
    counted = answer.budget.system + answer.budget.recent_turns + answer.budget.older_summary
    assert counted == len(sent.token_ids) == answer.usage.input_tokens
    assert [row.model for row in rig.outbox.rows] == ["small"]


@pytest.mark.parametrize("degraded", [True, False])
async def test_a_deadline_that_passes_while_a_fallback_plans_the_prompt_leaves_the_degraded_text_or_504(
    build_rig: Build, ask: Ask, models: Models, degraded: bool
) -> None:
    async def too_late(work: Callable[[], object], /) -> Any:
        raise DeadlineExceeded("the deadline passed")

    fallback = ["small", "degraded"] if degraded else ["small"]
    route = {**BOTH, "fallback": fallback, "budgets": {"recent_turns": 3000}}
    rig = build_rig(backends=two(DEAD), route=route, models=models)
    rig = replace(rig, journey=replace(rig.journey, offload=lambda request: too_late))
    sink = await rig.run(ask(messages=talk(101)))
    if degraded:
        assert sink.answer is not None and sink.answer.fallback is not None
        assert sink.answer.fallback.kind == "degraded_response"
    else:
        assert sink.error is not None and sink.error.code == "deadline_exceeded"
    assert not rig.backends["small"].calls and rig.in_use() == []


async def test_a_models_own_budgets_trim_prompts_for_it_alone(
    build_rig: Build, ask: Ask, texts: Mapping[str, ModelText]
) -> None:
    own = SectionBudgets(system=50, retrieval=0, recent_turns=100, older_summary=0)
    models = Models(texts["large"], {"small": texts["large"]}, {"small": own})
    words = talk(101)
    rig = build_rig(backends=two(DEAD), route=BOTH, models=models)
    answer = (await rig.run(ask(messages=words))).answer
    assert answer is not None and answer.model == "small"
    [first], [sent] = rig.backends["large"].calls, rig.backends["small"].calls
    assert len(first.messages) >= len(words) > len(sent.messages)
    assert "planned again for small" in answer.warnings[0]


@pytest.mark.parametrize(
    ("changes", "turns"),
    [
        ({}, 30),
        ({"version": SectionBudgets(recent_turns=60)}, 60),
        ({"route": {"budgets": {"recent_turns": 90}}}, 90),
        ({"contract": Contract.CHAT}, None),
        ({"contract": Contract.CHAT, "truncate": True}, 30),
        ({"contract": Contract.CHAT, "route": {"trim_in": ["openai"]}}, 30),
        ({"route": {"trim_in": ["openai"]}}, None),
    ],
)
async def test_a_models_budgets_are_the_last_to_be_asked_and_only_where_trimming_is_allowed(
    ask: Ask, texts: Mapping[str, ModelText], changes: dict[str, Any], turns: int | None
) -> None:
    whole = {"routes": {"r": {"backends": [{"name": "b"}], **changes.pop("route", {})}}}
    route = make_revision(1, whole, KnownNames(["b"], [], [])).routes["r"]
    version = PromptVersion("v", "S", budgets=changes.pop("version", None))
    request = ask(**changes)
    own = {"small": SectionBudgets(recent_turns=30)}
    asked = budget_request(request, CanonicalPrompt(system=("S",)), version, route)
    models = Models(texts["large"], {"small": texts["small"]}, own)
    planning = Planning(models, asked, asyncio.to_thread)
    budgets = planning.asked_of("small").budgets
    assert (None if budgets is None else budgets.recent_turns) == turns
    assert planning.asked_of("large") is asked


async def test_a_fallback_that_cuts_nothing_adds_no_warning(
    build_rig: Build, ask: Ask, models: Models
) -> None:
    rig = build_rig(backends=two(DEAD), route=BOTH, models=models)
    answer = (await rig.run(ask(messages=talk(3)))).answer
    assert answer is not None and (answer.model, answer.warnings) == ("small", ())


@pytest.mark.parametrize(
    "changes",
    [
        {"messages": talk(101)},
        {"sampling": Sampling(max_tokens=LENGTH)},
        {"messages": (), "raw_prompt": (5, 6, 7)},
    ],
    ids=["longer", "a longer answer", "another model's ids"],
)
async def test_a_fallback_whose_model_cannot_hold_the_prompt_is_passed_over(
    build_rig: Build, ask: Ask, models: Models, changes: dict[str, object]
) -> None:
    route = {"backends": [{"name": "large"}], "fallback": ["small", "degraded"]}
    rig = build_rig(backends=two(DEAD), route=route, models=models)
    answer = (await rig.run(ask(**changes))).answer
    assert answer is not None and answer.fallback is not None
    assert answer.fallback.kind == "degraded_response"
    assert rig.backends["small"].calls == [] and rig.in_use() == []


@pytest.mark.parametrize("continues", [Continue.TOKENS, Continue.TEXT])
async def test_a_partial_answer_is_resumed_on_another_model_with_that_models_prompt(
    build_rig: Build,
    ask: Ask,
    models: Models,
    texts: Mapping[str, ModelText],
    continues: Continue,
) -> None:
    pieces = ("Vin", "land", " Saga")
    ids = tuple(texts["large"].tokenizer.encode("Vinland Saga", add_special_tokens=False))[:1] * 3
    whole = Script(pieces, token_ids=ids)
    cut = replace(whole, failure=BackendFailure(FailureKind.STREAM_BROKEN, "cut"), breaks_after=1)
    rig = build_rig(
        backends=two(cut, DEAD, small=(Script(pieces),), continues=frozenset({continues})),
        route={**BOTH, "resume": {"commit_chunks": 0}},
        models=models,
    )
    sink = await rig.run(ask(messages=talk(3), stream=True))
    assert sink.answer is not None and sink.text == "Vinland Saga"
    [rest] = rig.backends["small"].calls
    assert rest.token_ids == texts["small"].encode_chat(talk(3))
    assert rest.partial is not None and rest.partial.text == "Vin"
    prefix_ids = texts["small"].tokenizer.encode("Vin", add_special_tokens=False)
    assert rest.partial.token_ids == (prefix_ids if continues is Continue.TOKENS else None)


async def test_blocks_of_a_prefix_have_the_models_size(build_rig: Build, ask: Ask, models: Models) -> None:
    rig = build_rig(backends=two(), route=BOTH, models=models)
    rig = replace(
        rig,
        journey=replace(
            rig.journey,
            prefixes=type(rig.journey.prefixes)(block_size=lambda name: models.of(name).block_size),
        ),
    )
    system = Message(Role.SYSTEM, "Follow the catalog. " * 12)
    await rig.run(ask(model="small", contract=Contract.CHAT, messages=(system, *talk(3)[1:])))
    [record] = rig.records
    assert record.prefix_tokens is not None and record.prefix_tokens > 0 and record.prefix_tokens % 32 == 0


async def test_the_catalogue_changes_while_requests_are_served(
    build_rig: Build, ask: Ask, models: Models, texts: Mapping[str, ModelText]
) -> None:
    del models.own["small"]
    rig = build_rig(backends=two(), route=BOTH, models=models)
    request = ask(contract=Contract.CHAT, model="small", messages=talk(3))
    await rig.run(request)
    models.own["small"] = texts["small"]
    await rig.run(structs.replace(request, request_id="req_2", generation_id="gen_2"))
    before, after = rig.backends["small"].calls
    assert before.token_ids == texts["large"].encode_chat(request.messages)
    assert after.token_ids == texts["small"].encode_chat(request.messages)


async def test_a_pool_of_several_models_falls_back_with_the_requests_model_where_it_has_it(
    build_rig: Build, ask: Ask, models: Models
) -> None:
    pool = [ScriptedBackend(f"gpus/{model}", model=model) for model in ("large", "small")]
    for asked, expected in (("small", "gpus/small"), ("large", "gpus/large"), ("third", "gpus/large")):
        dead = ScriptedBackend("local", scripts=(DEAD,), model=asked)
        route = {"backends": [{"name": "local"}], "fallback": [one.name for one in pool]}
        rig = build_rig(backends=[dead, *pool], route=route, models=models)
        answer = (await rig.run(ask())).answer
        assert answer is not None and answer.backend_name == expected


class Switching(Models):
    """The workers of the small model change into others while a prompt is planned for them."""

    small: ScriptedBackend | None = None

    def of(self, model: str) -> ModelText:
        if model == "small" and self.small is not None:
            self.small.continues = frozenset()
        return super().of(model)


async def test_a_part_stays_a_part_if_the_next_backend_can_no_longer_resume_it_once_it_is_planned(
    build_rig: Build, ask: Ask, texts: Mapping[str, ModelText]
) -> None:
    models = Switching(texts["large"], {"small": texts["small"]})
    cut = Script(breaks_after=1, failure=BackendFailure(FailureKind.STREAM_BROKEN, "cut"))
    backends = two(cut)
    backends[1].continues, models.small = frozenset({Continue.TEXT}), backends[1]
    legs = {"small": LegLimit(max_concurrency=1)}
    rig = build_rig(backends=backends, route=BOTH, models=models, legs=legs)
    sink = await rig.run(ask(stream=True))
    assert sink.text == "Hello" and sink.error is not None and sink.error.code == "backend_unavailable"
    assert rig.in_use() == []
