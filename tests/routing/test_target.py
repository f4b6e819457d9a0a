"""Resolving the names in a request; an error lists only the names that the caller's key may use."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
from msgspec.structs import replace

from adapters.catalogue import AdapterState
from adapters.errors import UnknownAdapter
from adapters.registry import AdapterRegistry
from adapters.selection import AdapterOffer, Lease
from adapters.values import Adapter, Selection
from gateway.backends.port import Fleet
from gateway.contracts.embeddings import EmbeddingsAnswer, EmbeddingsRequest
from gateway.contracts.model_card import CardKind, ModelCard
from gateway.contracts.openai import ChatRequest
from gateway.contracts.refusals import parse
from gateway.contracts.values import Caller, CallerRole, Contract, GenerateRequest
from gateway.errors import BackendUnavailable, Forbidden, InvalidRequest, UnknownModel, UnknownRoute
from gateway.generation.job import rank_backends
from gateway.keys.usable_models import usable
from gateway.lora.model_cards import model_cards
from gateway.routing.check import KnownNames
from gateway.routing.revision import make_revision
from gateway.routing.target import MAX_COMPARED, Target, nearest, resolve
from tests.routing.test_rank import Silent
from tests.scripted import ScriptedBackend

FLEET = Fleet(
    {
        "local": ScriptedBackend("local", model="demo"),
        "pool": ScriptedBackend("pool", model="demo"),
        "big": ScriptedBackend("big", model="demo-70b"),
    }
)
ROUTES = {
    "chat": {"backends": [{"name": "local"}]},
    "code": {"backends": [{"name": "pool"}], "fallback": ["big"]},
}


def registry(**states: AdapterState) -> AdapterRegistry:
    """A registry of adapters in these states."""
    known = AdapterRegistry()
    known.offer(AdapterOffer({name: Adapter(name, 1, "demo", f"adapters/{name}") for name in states}, states))
    return known


ADAPTERS = registry(manga=AdapterState.ACTIVE, style=AdapterState.CANARY, new=AdapterState.STAGED)
REVISION = make_revision(1, {"routes": ROUTES}, KnownNames(FLEET.backends, (), None))


def found(
    model: str | None,
    *,
    route: str = "chat",
    routes: tuple[str, ...] | None = None,
    adapters: tuple[str, ...] | None = None,
    models: tuple[str, ...] | None = None,
    adapter: str | None = None,
) -> Target:
    caller = Caller("t", CallerRole.CALLER, "key_1", routes=routes, adapters=adapters, models=models)
    request = GenerateRequest(
        "r", "g", caller, contract=Contract.NATIVE, arrived_at=0.0, created=0, route=route, model=model,
        adapter_id=adapter,
    )  # fmt: skip
    return resolve(request, REVISION, FLEET, ADAPTERS)


@pytest.mark.parametrize("model", [None, "demo"])
def test_a_request_whose_model_is_gone_since_it_was_resolved_is_asked_to_come_again(
    model: str | None,
) -> None:
    request = GenerateRequest(
        "r", "g", Caller("t", CallerRole.CALLER, "key_1"), contract=Contract.NATIVE, arrived_at=0.0, created=0
    )
    target, left = found(model), {"pool": FLEET.backends["pool"]}
    assert rank_backends(request, target, Lease(None, "none"), FLEET).candidates[0].name == "local"
    with pytest.raises(BackendUnavailable, match="send the request again") as refused:
        rank_backends(request, target, Lease(None, "none"), Fleet(left))
    assert refused.value.retry_after_ms


def test_a_model_is_the_base_an_adapter_or_a_backend() -> None:
    assert found("demo").adapter_id is None and found("demo").backend is None
    assert found("manga").adapter_id == "manga"
    assert found("pool").backend == "pool"


class Unlisted(ScriptedBackend):
    """A pool whose workers have not listed their models."""

    known = False


@pytest.mark.parametrize("models", [None, ("qwen",)])
def test_a_name_that_workers_may_list_soon_is_tried_again_and_not_unknown(
    models: tuple[str, ...] | None,
) -> None:
    fleet = Fleet({"pool": Unlisted("pool", model="pool"), "local": ScriptedBackend("local", model="demo")})
    caller = Caller("t", CallerRole.CALLER, "key_1", models=models)
    request = GenerateRequest(
        "r", "g", caller, contract=Contract.CHAT, arrived_at=0.0, created=0, route="code", model="qwen"
    )
    routes = {"chat": ROUTES["chat"], "code": {"backends": [{"name": "pool"}]}}
    revision = make_revision(1, {"routes": routes}, KnownNames(fleet.backends, (), None))
    with pytest.raises(BackendUnavailable, match="have not listed their models yet") as refused:
        resolve(request, revision, fleet, ADAPTERS)
    assert refused.value.retry_after_ms
    with pytest.raises((UnknownModel, Forbidden)):
        resolve(replace(request, route="chat"), revision, fleet, ADAPTERS)


def test_a_model_that_is_an_adapter_and_another_adapter_contradict_each_other() -> None:
    assert found("manga", adapter="manga").adapter_id == "manga"
    with pytest.raises(InvalidRequest, match="model names the adapter 'manga' and adapter_id another one"):
        found("manga", adapter="style")


def test_a_model_that_a_route_names_selects_that_route_with_all_its_backends() -> None:
    routes = {**ROUTES, "code": {**ROUTES["code"], "models": ["gpt-4o", "demo", "org/x"]}}
    revision = make_revision(1, {"routes": routes}, KnownNames(FLEET.backends, (), None))

    def target(model: str, route: str | None = None, **limits: tuple[str, ...]) -> Target:
        caller = Caller("t", CallerRole.CALLER, "key_1", **limits)  # type: ignore[arg-type]
        request = GenerateRequest(
            "r", "g", caller, contract=Contract.CHAT, arrived_at=0.0, created=0, route=route, model=model
        )
        return resolve(request, revision, FLEET, registry(manga=AdapterState.ACTIVE))

    for model in ("gpt-4o", "demo", "org/x"):
        assert target(model).route.name == "code" and target(model).model is None
    assert target("demo", route="chat").model == "demo", "a route that the caller names"
    assert target("local").backend == "local" and target("manga").adapter_id == "manga"
    with pytest.raises(Forbidden, match="'code'"):
        target("gpt-4o", routes=("chat",))
    with pytest.raises(UnknownModel, match=r"known: demo, local, manga$"):
        target("gpt-4", routes=("chat",))
    cards = [ModelCard("demo", "demo"), ModelCard("big", "demo-70b", kind=CardKind.BACKEND)]
    listed = [card.id for card in usable(cards, Caller("t", CallerRole.CALLER, "k"), revision)]
    assert listed == ["gpt-4o", "demo", "org/x", "big"]
    assert usable(cards, Caller("t", CallerRole.CALLER, "k", routes=("chat",)), revision) == []


def test_a_routes_model_name_is_neither_listed_nor_suggested_to_a_key_without_a_model_of_the_route() -> None:
    routes = {**ROUTES, "code": {"backends": [{"name": "big"}], "models": ["gpt-4o"]}}
    revision = make_revision(1, {"routes": routes}, KnownNames(FLEET.backends, (), None))
    cards = model_cards(FLEET, registry(), lambda model: 8)
    for models, shown in ((("demo",), False), (("demo", "demo-70b"), True), (None, True)):
        caller = Caller("t", CallerRole.CALLER, "key_1", models=models)
        request = GenerateRequest(
            "r", "g", caller, contract=Contract.CHAT, arrived_at=0.0, created=0, model="mars"
        )
        assert ("gpt-4o" in {card.id for card in usable(cards, caller, revision)}) is shown
        with pytest.raises(UnknownModel) as unknown:
            resolve(request, revision, FLEET, registry())
        assert ("gpt-4o" in unknown.value.message) is shown
        with pytest.raises(
            UnknownModel, match=r"'gpt-4o' is not served by route 'chat'; known: [^']*$"
        ) as unknown:
            resolve(replace(request, route="chat", model="gpt-4o"), revision, FLEET, registry())
        assert "gpt-4o" not in unknown.value.message.partition(";")[2], (
            "it selects no route beside a named one"
        )


def test_only_a_model_whose_backend_makes_vectors_shows_how() -> None:
    generates = ScriptedBackend("local", model="demo")
    assert generates.kind == "embedded", "as the engine replicas on Ray, which make no vectors"
    fleet = Fleet({"local": generates})
    assert {card.pooling for card in model_cards(fleet, registry(), lambda model: 8)} == {None}


class Pooling(ScriptedBackend):
    """A backend that also makes vectors."""

    async def embed(self, part: EmbeddingsRequest) -> EmbeddingsAnswer:
        raise NotImplementedError


class OnlyVectors(Pooling):
    """An engine whose model generates no text."""

    generates = False


@pytest.mark.parametrize(
    ("limits", "shown"),
    [
        ({}, {"demo", "bge", "bge-alias", "e5"}),
        ({"models": ("demo", "e5")}, {"demo", "e5"}),
        ({"routes": ("chat",)}, {"demo"}),
        ({"routes": ("chat", "vectors")}, {"demo", "e5"}),
    ],
    ids=["no limit", "models", "a route", "a route of vectors"],
)
def test_a_model_of_vectors_is_listed_for_each_key_that_may_use_it(
    limits: dict[str, tuple[str, ...]], shown: set[str]
) -> None:
    fleet = Fleet(
        {
            "local": Pooling("local", model="demo"),
            "other": Pooling("other", model="coder"),
            "unrouted": Pooling("unrouted", model="bge"),
            "vectors": OnlyVectors("vectors", model="e5"),
        },
        aliases={"bge-alias": "bge"},
    )
    routes = {
        "chat": {"backends": [{"name": "local"}]},
        "code": {"backends": [{"name": "other"}]},
        "vectors": {"backends": [{"name": "vectors"}]},
    }
    revision = make_revision(
        1, {"routes": routes, "openai_route": "chat"}, KnownNames(fleet.backends, (), None)
    )
    caller = Caller("t", CallerRole.CALLER, "k", **limits)  # type: ignore[arg-type]
    found = usable(model_cards(fleet, registry(), lambda _: 8), caller, revision)
    assert {card.id for card in found if card.kind is not CardKind.BACKEND} == shown
    assert found[0].id == "demo", "the first model of the list takes chats"


def test_every_name_of_a_model_shows_whether_its_backend_takes_images() -> None:
    plain = ScriptedBackend("plain", model="text", features=frozenset())
    fleet = Fleet({"plain": plain, "sees": ScriptedBackend("sees", model="demo")}, aliases={"eye": "demo"})
    routes = {
        "chat": {"backends": [{"name": "plain"}], "models": ["gpt-text"]},
        "look": {"backends": [{"name": "sees"}], "models": ["gpt-4o"]},
    }
    revision = make_revision(
        1, {"routes": routes, "openai_route": "chat"}, KnownNames(fleet.backends, (), None)
    )
    cards = model_cards(fleet, registry(), lambda model: 8)
    shown = [*cards, *usable(cards, Caller("t", CallerRole.CALLER, "k"), revision)]
    assert {card.id for card in shown if card.images} == {"demo", "sees", "eye", "gpt-4o"}
    assert {card.id for card in shown if not card.images} == {"text", "plain", "gpt-text"}


@pytest.mark.parametrize(
    ("model", "shown"), [(f"/models/{'m' * 200}", True), ("m" * 257, False), ("a\nb", False), (" ", False)]
)
def test_a_model_is_listed_if_its_id_can_be_sent(model: str, shown: bool) -> None:
    cards = model_cards(Fleet({"pool": ScriptedBackend("pool", model=model)}), registry(), lambda _: 8)
    assert (model in {card.id for card in cards}) is shown
    assert "pool" in {card.id for card in cards}, "the pool's name selects the model in any case"
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}]}
    with nullcontext() if shown else pytest.raises(InvalidRequest):
        assert parse(ChatRequest, json.dumps(body).encode()).model == model


def test_a_model_whose_backend_has_its_name_is_shown_once() -> None:
    fleet = Fleet({
        "demo": ScriptedBackend("demo", model="demo"),
        "big": ScriptedBackend("big", model="demo-70b"),
        "demo-70b": ScriptedBackend("demo-70b", model="small"),
    })  # fmt: skip
    routes = {"chat": {"backends": [{"name": "demo"}]}}
    revision = make_revision(
        1, {"routes": routes, "openai_route": "chat"}, KnownNames(fleet.backends, (), None)
    )
    cards = model_cards(fleet, registry(), lambda model: len(model))
    shown = usable(cards, Caller("t", CallerRole.CALLER, "k"), revision)
    assert [(card.id, card.root, card.kind, card.max_model_len) for card in shown] == [
        ("demo", "demo", CardKind.BASE, 4),
        ("big", "demo-70b", CardKind.BACKEND, 8),
        ("demo-70b", "small", CardKind.BACKEND, 5),
    ]
    limited = usable(cards, Caller("t", CallerRole.CALLER, "k", routes=("chat",)), revision)
    assert [card.id for card in limited] == ["demo"]


def test_a_base_model_is_one_that_a_backend_of_the_route_serves() -> None:
    assert found("demo-70b", route="code").model == "demo-70b"
    with pytest.raises(UnknownModel, match="'demo-70b' is not served by route 'chat'"):
        found("demo-70b")


@pytest.mark.parametrize(
    ("limits", "known"),
    [
        ({}, "big, demo, local, manga, pool, style"),
        ({"adapters": ("manga",)}, "big, demo, local, manga, pool"),
        ({"routes": ("chat",)}, "demo, local, manga, style"),
        ({"routes": ("chat",), "adapters": ()}, "demo, local"),
    ],
)
def test_an_unknown_model_is_answered_with_those_that_the_key_may_name(
    limits: dict[str, tuple[str, ...]], known: str
) -> None:
    with pytest.raises(UnknownModel, match=f"'mars' is not served by route 'chat'; known: {known}$"):
        found("mars", **limits)  # type: ignore[arg-type]


def test_an_unknown_name_is_not_answered_with_adapters_of_models_that_the_key_may_not_use() -> None:
    with pytest.raises(UnknownModel, match=r"known: big, demo-70b$"):
        found("mars", route="code", models=("demo-70b",))
    for models, known in ((("demo-70b",), "none"), (("demo",), "manga, style")):
        with pytest.raises(UnknownAdapter, match=f"known: {known}$"):
            ADAPTERS.lease(Selection("mars", models=models))


def test_an_unknown_name_is_compared_with_a_bounded_number_of_known_ones() -> None:
    names = [f"adapter-{number}" for number in range(MAX_COMPARED + 1)]
    assert nearest("adaptor-7", names[1:]).startswith("did you mean adapter-7 ")
    assert nearest("adaptor-7", names).startswith("known: adapter-0, ")


def test_an_unknown_route_is_answered_with_those_that_the_key_may_take() -> None:
    with pytest.raises(UnknownRoute, match=r"known: chat, code$"):
        found(None, route="mars")
    with pytest.raises(UnknownRoute, match=r"known: code$"):
        found(None, route="mars", routes=("mars", "code"))
    with pytest.raises(Forbidden, match="may not use route 'chat'; allowed: code"):
        found(None, routes=("code",))


def test_a_model_that_makes_vectors_alone_is_no_chat_model() -> None:
    fleet = Fleet({**FLEET.backends, "local": Silent("local", model="bge-m3")})
    caller = Caller("t", CallerRole.CALLER, "key_1")
    request = GenerateRequest(
        "r", "g", caller, contract=Contract.CHAT, arrived_at=0.0, created=0, route="chat", model="bge-m3"
    )
    with pytest.raises(UnknownModel, match="'bge-m3' generates no text"):
        resolve(request, REVISION, fleet, AdapterRegistry())


def test_a_backend_that_makes_vectors_alone_is_no_chat_model_and_no_suggestion_for_one() -> None:
    fleet = Fleet({**FLEET.backends, "vectors": Silent("vectors", model="bge-m3")})
    caller = Caller("t", CallerRole.CALLER, "key_1")
    for name, answer in (
        ("vectors", "'vectors' generates no text"),
        ("mars", "known: big, demo, local, pool$"),
    ):
        request = GenerateRequest(
            "r", "g", caller, contract=Contract.CHAT, arrived_at=0.0, created=0, route="chat", model=name
        )
        with pytest.raises(UnknownModel, match=answer):
            resolve(request, REVISION, fleet, AdapterRegistry())


def test_a_model_that_makes_vectors_is_unknown_like_any_other_to_a_key_that_may_not_use_it() -> None:
    fleet = Fleet({**FLEET.backends, "vectors": Silent("vectors", model="bge-m3")})
    routes = {"chat": {"backends": [{"name": "local", "weight": 100}, {"name": "vectors", "weight": 0}]}}
    revision = make_revision(1, {"routes": routes}, KnownNames(fleet.backends, (), None))
    caller = Caller("t", CallerRole.CALLER, "key_1", models=("demo",))
    for name in ("bge-m3", "bge-m4"):
        request = GenerateRequest(
            "r", "g", caller, contract=Contract.NATIVE, arrived_at=0.0, created=0, route="chat", model=name
        )
        with pytest.raises(UnknownModel, match=f"'{name}' is not served by route 'chat'"):
            resolve(request, revision, fleet, AdapterRegistry())
