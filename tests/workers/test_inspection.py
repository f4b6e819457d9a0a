"""What a gateway finds out about its workers by asking them."""

from __future__ import annotations

import asyncio
import json

import pytest

from gateway.backends.workers.inspection import Inspection, WorkerInspections
from tests.workers.raw_worker import RawWorker, Request, make, pool, state_of

IDS = [5, 6, 7]


async def answer(request: Request) -> None:
    """Answer with one token of text."""
    await request.whole(200, json.dumps({"choices": [{"text": "x"}]}).encode())


async def unknown(request: Request) -> None:
    await request.whole(404, b"{}")


def lists(name: str = "base", length: int | None = 4096) -> bytes:
    return json.dumps({"data": [{"id": name, "max_model_len": length}]}).encode()


async def asked(worker: RawWorker, *, ids: list[int] = IDS, length: int = 4096) -> Inspection:
    async with pool(worker, ready=False) as backend:
        [found] = await backend.inspect(ids, length, generate=True)
    return found


async def test_a_good_worker_has_no_faults_and_its_figures_are_known() -> None:
    found = await asked(RawWorker([answer], models=lambda: lists(), tokenize=lambda prompt: IDS))
    assert (found.faults, found.unusable) == ((), False)
    assert (found.model, found.max_model_len, found.tokenizer) == ("base", 4096, "equal")
    assert found.latency_ms is not None and found.latency_ms > 0


async def test_a_worker_that_does_not_serve_the_model_is_unusable_and_the_fault_names_what_it_serves() -> (
    None
):
    found = await asked(RawWorker([answer], models=lambda: lists("another")))
    assert found.unusable
    assert found.faults == ("does not serve 'base'; correct model; it serves: another",)


@pytest.mark.parametrize(
    "listed",
    [{"data": [{"id": "models/base"}]}, {"data": []}, [{"id": "base"}], {"data": None}],
    ids=["partial list", "empty list", "bare list", "null"],
)
async def test_a_service_whose_list_lacks_the_model_or_is_of_another_form_is_usable_if_it_answers(
    listed: object,
) -> None:
    found = await asked(RawWorker([answer], models=lambda: json.dumps(listed).encode()))
    assert (found.unusable, found.faults, found.model) == (False, (), "base")
    async with pool(RawWorker([answer], models=lambda: json.dumps(listed).encode())) as backend:
        [found] = await backend.inspect(IDS, 4096, generate=False)
        assert not found.unusable


async def test_a_list_of_models_that_is_nested_too_deep_is_no_list_and_ends_nothing() -> None:
    deep = b'{"data": [{"id": "base", "meta": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]}"
    async with pool(RawWorker([answer], models=lambda: deep)) as backend:
        [found] = await backend.inspect(IDS, 4096, generate=False)
        assert (found.unusable, found.faults, found.model) == (False, (), "base")


@pytest.mark.parametrize(
    "entry",
    [
        {"context_length": 4000},
        {"context_window": 4000, "max_model_len": None},
        {"max_context_length": 4000, "context_length": "8k"},
        {"max_context_length": 4000, "context_length": 10**30},
        {"owned_by": "llamacpp", "meta": {"n_ctx": 4000, "n_ctx_train": 131072}},
    ],
)
async def test_a_length_under_another_servers_name_is_found_and_leaves_its_list_partial(
    entry: dict[str, object],
) -> None:
    listed = json.dumps({"data": [{"id": "base", **entry}]}).encode()
    found = await asked(RawWorker([answer], models=lambda: listed), length=4000)
    assert (found.max_model_len, found.faults) == (4000, ())
    others = json.dumps({"data": [{"id": "another", **entry}]}).encode()
    assert not (await asked(RawWorker([answer], models=lambda: others))).unusable


async def test_a_service_that_knows_no_such_model_is_unusable_and_the_fault_names_what_it_lists() -> None:
    found = await asked(RawWorker([unknown], models=lambda: lists("another", None)))
    assert found.unusable
    assert found.faults == ("does not serve 'base'; correct model; it serves: another",)


@pytest.mark.parametrize(
    ("ids", "length", "fault"),
    [
        ([5, 6], 4096, "its tokenizer differs"),
        (IDS, 8192, "takes 4096 tokens, prompts may have 8192; set models.base"),
    ],
)
async def test_another_tokenizer_and_a_shorter_context_are_faults(
    ids: list[int], length: int, fault: str
) -> None:
    found = await asked(
        RawWorker([answer], models=lambda: lists(), tokenize=lambda prompt: IDS), ids=ids, length=length
    )
    assert not found.unusable and len(found.faults) == 1 and found.faults[0].startswith(fault)


@pytest.mark.parametrize(("role", "faults"), [("caller", 1), ("operator", 1), ("front", 0), ("admin", 0)])
async def test_a_key_at_another_sluice_that_is_no_fronts_is_a_fault_that_tells_how_to_make_one(
    role: str, faults: int
) -> None:
    listed = json.dumps({"data": [{"id": "base"}], "sluice_role": role}).encode()
    found = await asked(RawWorker([answer], models=lambda: listed))
    assert not found.unusable and len(found.faults) == faults
    assert all(f"'{role}'" in fault and "--role front" in fault for fault in found.faults)


async def test_a_server_of_another_kind_without_models_and_tokenizer_is_not_faulted_for_it() -> None:
    found = await asked(RawWorker([answer]))
    assert (found.faults, found.tokenizer, found.max_model_len) == ((), "not known", None)


async def test_a_worker_that_generates_nothing_or_is_gone_is_unusable() -> None:
    found = await asked(RawWorker([unknown], models=lambda: lists()))
    [fault] = found.faults
    assert found.unusable and fault.startswith(
        "generates nothing (status 404); see its log, and whether base_urls"
    )
    [gone] = await make("http://127.0.0.1:9/v1").inspect(IDS, 4096, generate=True)
    assert gone.unusable and gone.faults[0].endswith("start it, or correct base_urls")


async def test_a_worker_that_redirects_is_unusable_and_the_fault_names_base_urls() -> None:
    async def moved(request: Request) -> None:
        await request.whole(301, b"", "location: https://elsewhere/v1")

    found = await asked(RawWorker([moved]))
    assert found.unusable and found.faults[0].startswith("redirects requests (status 301)")


async def test_a_worker_of_other_work_is_usable_though_it_generates_nothing() -> None:
    worker = RawWorker([unknown], models=lambda: lists(), posts=frozenset({"/v1/rerank"}))
    found = await asked(worker)
    assert (found.unusable, found.faults, found.latency_ms) == (False, (), None)


async def test_a_server_that_refuses_vllms_fields_is_found_before_the_first_request() -> None:
    async def strict(request: Request) -> None:
        refused = "return_token_ids" in request.body
        await request.whole(422 if refused else 200, b"{}")

    found = await asked(RawWorker([strict], models=lambda: lists()))
    assert found.unusable and found.faults[0].endswith("if it refuses vLLM's fields, set dialect: openai")
    async with pool(RawWorker([strict], models=lambda: lists()), ready=False, dialect="openai") as backend:
        [found] = await backend.inspect(IDS, 4096, generate=True)
    assert not found.unusable


@pytest.mark.parametrize(
    ("keys", "limit_field"),
    [
        ({}, "max_tokens"),
        ({"dialect": "openai"}, "max_completion_tokens"),
        ({"dialect": "openai", "max_tokens_field": "max_tokens"}, "max_tokens"),
    ],
)
async def test_a_service_that_has_chats_alone_is_asked_for_one_with_the_limit_as_in_requests(
    keys: dict[str, str], limit_field: str
) -> None:
    async def chats(request: Request) -> None:
        await (answer if request.path == "/v1/chat/completions" else unknown)(request)

    service = RawWorker([chats], models=lambda: lists())
    async with pool(service, ready=False, **keys) as backend:
        [found] = await backend.inspect(IDS, 4096, generate=True)
    assert not found.unusable and found.latency_ms is not None
    assert [name for name in service.requests[-1].body if name.startswith("max_")] == [limit_field]


async def test_a_pool_is_unusable_when_every_worker_is() -> None:
    good, bad = Inspection("a"), Inspection("b", unusable=True)

    async def ask(generate: bool) -> dict[str, list[Inspection]]:
        return {"half": [good, bad], "none": [bad, bad], "empty": []}

    inspections = WorkerInspections(ask)
    assert not inspections.unusable("none"), "nothing is known yet"
    await inspections.now()
    assert [inspections.unusable(name) for name in ("half", "none", "empty", "other")] == [
        False, True, False, False,
    ]  # fmt: skip


async def test_inspections_at_the_same_time_do_not_keep_a_good_worker_from_being_probed() -> None:
    async def slow(request: Request) -> None:
        await asyncio.sleep(0.5)
        await answer(request)

    async with pool(RawWorker([slow], models=lambda: lists())) as backend:

        async def ask(generate: bool) -> dict[str, list[Inspection]]:
            return {"base": await backend.inspect(IDS, 4096, generate=generate)}

        inspections = WorkerInspections(ask)
        found = await asyncio.gather(*[inspections.now() for _ in range(4)])
        assert [one.unusable for each in found for one in each["base"]] == [False] * 4
        assert state_of(backend)[0].ejections == 0
