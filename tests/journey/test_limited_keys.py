"""A key limited to routes, adapters or models is refused the others, before anything is spent on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from adapters.values import Adapter
from gateway.contracts.model_card import CardKind, ModelCard
from gateway.contracts.values import GenerateRequest
from gateway.keys.usable_models import usable
from gateway.routing.target import may_use
from resilience.failures import BackendFailure, FailureKind
from tests.journey.rig import CALLER, JourneyRig, RecordingSink
from tests.scripted import Script, ScriptedBackend

Build = Callable[..., JourneyRig]
Ask = Callable[..., GenerateRequest]

ROUTE = "self_hosted_generation"
ADAPTERS = [Adapter("jp", 1, "scripted", "adapters/jp"), Adapter("manga", 2, "scripted", "adapters/m")]
BOTH = {"backends": [{"name": "local", "weight": 100}, {"name": "spare", "weight": 0}]}
RULES = {"adapter_rules": [{"when": {"locale": "ja"}, "adapter": "jp"}]}


async def sent(rig: JourneyRig, request: GenerateRequest) -> tuple[str, str | None]:
    """Returns the error's code and param, or the answer's backend and adapter."""
    sink = RecordingSink()
    await rig.journey.run(request, sink)
    usable_again = may_use(request, rig.journey.revision(), rig.journey.fleet, rig.adapters)
    assert usable_again == (sink.error is None), "a stored answer is given by the same rule"
    assert not rig.adapters.leased()
    if sink.error is not None:
        if sink.error.code == "forbidden":
            assert sink.error.status == 403 and not rig.outbox.rows and not rig.adapters.leased()
        return sink.error.code, sink.error.param
    assert sink.answer is not None
    return sink.answer.backend_name, sink.answer.adapter_id


@pytest.mark.parametrize(
    ("routes", "asked", "expected"),
    [
        ((ROUTE,), {}, ("local", None)),
        (("other",), {}, ("forbidden", "route")),
        (("other",), {"route": ROUTE}, ("forbidden", "route")),
        ((ROUTE,), {"route": "nowhere"}, ("forbidden", "route")),
        (("nowhere",), {"route": "nowhere"}, ("unknown_route", "route")),
        (None, {"model": "spare"}, ("spare", None)),
        ((ROUTE,), {"model": "spare"}, ("forbidden", "model")),
    ],
)
async def test_a_key_may_use_only_its_routes(
    build_rig: Build,
    ask: Ask,
    routes: tuple[str, ...] | None,
    asked: dict[str, str],
    expected: tuple[str, str | None],
) -> None:
    rig = build_rig(backends=[ScriptedBackend(), ScriptedBackend("spare")])
    assert await sent(rig, ask(caller=replace(CALLER, routes=routes), **asked)) == expected


@pytest.mark.parametrize(
    ("adapters", "asked", "expected"),
    [
        (("jp",), {}, ("local", None)),
        (("jp",), {"adapter_id": "jp"}, ("local", "jp")),
        (("jp",), {"adapter_id": "manga"}, ("forbidden", "adapter_id")),
        (("jp",), {"model": "manga"}, ("forbidden", "model")),
        (("manga",), {"locale": "ja"}, ("forbidden", "adapter_id")),
        (None, {"locale": "ja"}, ("local", "jp")),
    ],
)
async def test_a_key_may_use_only_its_adapters_whether_named_or_chosen_by_a_rule(
    build_rig: Build,
    ask: Ask,
    adapters: tuple[str, ...] | None,
    asked: dict[str, str],
    expected: tuple[str, str | None],
) -> None:
    rig = build_rig(adapters=ADAPTERS, route=RULES)
    assert await sent(rig, ask(caller=replace(CALLER, adapters=adapters), **asked)) == expected


@pytest.mark.parametrize(
    ("models", "asked", "expected"),
    [
        (("scripted",), {}, ("local", None)),
        (("big",), {}, ("spare", None)),
        (("big",), {"model": "big"}, ("spare", None)),
        (("big",), {"model": "best"}, ("spare", None)),
        (("big",), {"model": "scripted"}, ("unknown_model", "model")),
        (("big",), {"model": "local"}, ("unknown_model", "model")),
        (("big",), {"adapter_id": "jp"}, ("forbidden", "model")),
        (("scripted",), {"adapter_id": "jp"}, ("local", "jp")),
        (("another",), {}, ("forbidden", "model")),
        (None, {"model": "best"}, ("spare", None)),
    ],
)
async def test_a_key_may_use_only_its_models_whether_named_or_drawn(
    build_rig: Build,
    ask: Ask,
    models: tuple[str, ...] | None,
    asked: dict[str, str],
    expected: tuple[str, str | None],
) -> None:
    rig = build_rig(
        backends=[ScriptedBackend(), ScriptedBackend("spare", model="big")], adapters=ADAPTERS, route=BOTH
    )
    caller = replace(CALLER, models=models, aliases=(("best", "big"),))
    assert await sent(rig, ask(caller=caller, **asked)) == expected


async def test_a_fallback_gives_no_answer_of_a_model_that_the_key_may_not_use(
    build_rig: Build, ask: Ask
) -> None:
    gone = Script((), failure=BackendFailure(FailureKind.ENGINE_DEAD, "gone"))
    rig = build_rig(
        backends=[ScriptedBackend(scripts=(gone, gone)), ScriptedBackend("spare", model="big")],
        route={"fallback": ["spare"]},
    )
    assert await sent(rig, ask()) == ("spare", None)
    caller = replace(CALLER, models=("scripted",))
    sink = RecordingSink()
    await rig.journey.run(ask(caller=caller), sink)
    assert sink.answer is None and sink.error is not None and sink.error.code == "backend_unavailable"


@pytest.mark.parametrize(
    ("limits", "shown"),
    [
        ({}, ["base", "jp", "manga", "loud", "local", "spare"]),
        ({"adapters": ("jp",)}, ["base", "jp", "local", "spare"]),
        ({"adapters": ("loud",)}, ["base", "loud", "local", "spare"]),
        ({"adapters": ("manga",)}, ["base", "manga", "loud", "local", "spare"]),
        ({"routes": (ROUTE,)}, ["base", "jp", "manga", "loud", "local"]),
        ({"routes": ("gone",), "adapters": ("gone",)}, []),
        ({"models": ("base",)}, ["base", "jp", "manga", "loud", "local"]),
        ({"models": ("big",)}, ["spare"]),
        (
            {"aliases": (("mine", "base"), ("gone", "gone"), ("base", "big"))},
            ["jp", "manga", "loud", "local", "spare", "mine"],
        ),
    ],
)
def test_the_models_shown_are_those_that_the_key_may_name(
    build_rig: Build, limits: dict[str, tuple[object, ...]], shown: list[str]
) -> None:
    rig = build_rig(backends=[ScriptedBackend(), ScriptedBackend("spare")])
    cards = [
        ModelCard("base", "base"),
        ModelCard("jp", "jp", "base", kind=CardKind.ADAPTER),
        ModelCard("manga", "manga", "base", kind=CardKind.ADAPTER),
        ModelCard("loud", "manga", "base", kind=CardKind.ADAPTER),
        ModelCard("local", "base", "base", kind=CardKind.BACKEND),
        ModelCard("spare", "big", "big", kind=CardKind.BACKEND),
        ModelCard("big", "big"),
        ModelCard("big-jp", "big-jp", "big", kind=CardKind.ADAPTER),
    ]
    found = usable(cards, replace(CALLER, **limits), rig.journey.revision())  # type: ignore[arg-type]
    assert [card.id for card in found] == shown


def test_a_keys_own_name_is_shown_as_what_it_selects(build_rig: Build) -> None:
    rig = build_rig(backends=[ScriptedBackend(), ScriptedBackend("spare")])
    cards = [
        ModelCard("base", "base", None, 4096),
        ModelCard("jp", "jp", "base", 4096, CardKind.ADAPTER),
        ModelCard("local", "base", "base", 4096, CardKind.BACKEND),
        ModelCard("small", "base", None, 4096, CardKind.ALIAS),
        ModelCard("taken", "base", None, 4096, CardKind.ALIAS),
    ]
    aliases = (("gpt-5", "small"), ("style", "jp"), ("taken", "jp"), ("none", "gone"), ("small", "gone"))
    caller = replace(CALLER, aliases=aliases[:-1])
    found = {card.id: card for card in usable(cards, caller, rig.journey.revision())}
    assert found.keys() == {"base", "jp", "local", "small", "gpt-5", "style", "taken"}
    assert (found["gpt-5"].root, found["gpt-5"].max_model_len) == ("base", 4096)
    assert [(found[name].root, found[name].parent) for name in ("style", "taken")] == [("jp", "base")] * 2
    hidden = usable(cards, replace(CALLER, aliases=aliases), rig.journey.revision())
    assert "small" not in {card.id for card in hidden}
