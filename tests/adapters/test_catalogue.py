"""The registry's rules: versions never change, aliases move at once and back, engine ids are never reused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from adapters import changes
from adapters.catalogue import AdapterState, Catalogue, CatalogueError, apply
from adapters.changes import NotEvaluatedError
from adapters.verify import Verified


def verified(content: str = "a") -> Verified:
    return Verified(8, 16.0, ("q_proj",), "demo", 1000, content * 64, True)


REPORT = {"passed": True, "candidate_sha256": "a" * 64}


class Registry:
    """Applies each event to the catalogue and stores it, like a gateway."""

    def __init__(self) -> None:
        self.now = Catalogue()
        self.events: list[bytes] = []

    def append(self, event: bytes | None) -> None:
        assert event is not None
        self.now = apply(self.now, event, number=self.now.number + 1, author="ann", at=1.0)
        self.events.append(event)

    def register(self, *names: str, passed: bool = True) -> Registry:
        for name in names:
            self.append(changes.register(self.now, name, verified(), base_model="demo", location=f"/{name}"))
            if passed:
                self.append(changes.evaluate(self.now, name, REPORT, signed=True))
        return self

    def promote(self, name: str, alias: str | None = "manga", **options: Any) -> None:
        self.append(changes.promote(self.now, name, alias=alias, **options))


def test_a_version_is_staged_until_an_alias_leads_to_it() -> None:
    registry = Registry().register("v1")
    assert registry.now.version("v1").state is AdapterState.STAGED
    registry.promote("v1")
    assert registry.now.version("v1").state is AdapterState.ACTIVE
    assert registry.now.aliases["manga"].resolve(0.5) == "v1"


def test_a_version_without_an_alias_is_active_under_its_own_name_and_is_no_canary() -> None:
    registry = Registry().register("v1", passed=False)
    with pytest.raises(NotEvaluatedError):
        registry.promote("v1", alias=None)
    with pytest.raises(CatalogueError, match="a share of an alias"):
        registry.promote("v1", alias=None, percent=10, force=True)
    registry.promote("v1", alias=None, force=True)
    assert registry.now.version("v1").state is AdapterState.ACTIVE
    assert registry.now.named_by("v1") == ()


def test_the_same_content_under_the_same_name_is_no_change_and_other_content_is_refused() -> None:
    registry = Registry().register("v1")
    assert changes.register(registry.now, "v1", verified(), base_model="demo", location="/x") is None
    with pytest.raises(CatalogueError, match="other content"):
        changes.register(registry.now, "v1", verified("b"), base_model="demo", location="/x")


def test_a_retired_name_is_not_registered_again() -> None:
    registry = Registry().register("v1")
    registry.append(changes.retire(registry.now, "v1"))
    with pytest.raises(CatalogueError, match="retired"):
        changes.register(registry.now, "v1", verified(), base_model="demo", location="/x")


def test_a_version_without_a_passing_report_is_promoted_by_force_only_and_the_event_says_so() -> None:
    registry = Registry().register("v1", passed=False)
    with pytest.raises(NotEvaluatedError, match="has not been run"):
        registry.promote("v1")
    registry.append(changes.evaluate(registry.now, "v1", {**REPORT, "passed": False}, signed=True))
    with pytest.raises(NotEvaluatedError, match="did not pass"):
        registry.promote("v1")
    registry.promote("v1", force=True)
    assert json.loads(registry.events[-1])["forced"] is True


def test_a_report_of_other_content_is_not_kept() -> None:
    registry = Registry().register("v1", passed=False)
    with pytest.raises(CatalogueError, match=r"report\.candidate_sha256: given 'bbb.*allowed: 'aaa"):
        changes.evaluate(registry.now, "v1", {**REPORT, "candidate_sha256": "b" * 64}, signed=True)
    registry.append(changes.evaluate(registry.now, "v1", REPORT, signed=True))
    assert registry.now.version("v1").passed


@pytest.mark.parametrize(
    ("report", "signed"),
    [(REPORT, False), ({"passed": True}, True), ({**REPORT, "signed": True}, False)],
    ids=["unsigned", "without the content's digest", "says itself that it is signed"],
)
@pytest.mark.parametrize("percent", [100.0, 99.9, 1.0])
def test_only_a_signed_report_of_this_content_lets_a_version_be_promoted_to_any_share(
    report: dict[str, Any], signed: bool, percent: float
) -> None:
    registry = Registry().register("v1").register("v2", passed=False)
    registry.promote("v1")
    registry.append(changes.evaluate(registry.now, "v2", report, signed=signed))
    with pytest.raises(NotEvaluatedError, match="is not signed by `sluice evaluate`"):
        registry.promote("v2", percent=percent)
    registry.promote("v2", percent=percent, force=True)


def test_a_canary_takes_its_share_of_sessions_and_keeps_them_when_it_grows() -> None:
    registry = Registry().register("v1", "v2")
    registry.promote("v1")
    registry.promote("v2", percent=25)
    alias = registry.now.aliases["manga"]
    assert [alias.resolve(f) for f in (0.0, 0.2499, 0.25, 0.99)] == ["v2", "v2", "v1", "v1"]
    registry.promote("v2", percent=50)
    grown = registry.now.aliases["manga"]
    assert all(grown.resolve(n / 100) == "v2" for n in range(100) if alias.resolve(n / 100) == "v2")
    assert registry.now.version("v2").state is AdapterState.CANARY


def test_ending_a_canary_stages_its_version_again() -> None:
    registry = Registry().register("v1", "v2")
    registry.promote("v1")
    registry.promote("v2", percent=10)
    registry.append(changes.end_canary(registry.now, "manga"))
    assert registry.now.version("v2").state is AdapterState.STAGED
    assert registry.now.aliases["manga"].resolve(0.0) == "v1"


def test_a_rollback_leads_to_the_version_before_and_skips_retired_ones() -> None:
    registry = Registry().register("v1", "v2", "v3")
    for name in ("v1", "v2", "v3"):
        registry.promote(name)
    registry.append(changes.retire(registry.now, "v2"))
    registry.append(changes.roll_back(registry.now, "manga"))
    assert registry.now.aliases["manga"].target == "v1"


def test_a_rollback_takes_the_canary_away() -> None:
    registry = Registry().register("v1", "v2", "v3")
    registry.promote("v1")
    registry.promote("v2")
    registry.promote("v3", percent=5)
    registry.append(changes.roll_back(registry.now, "manga"))
    alias = registry.now.aliases["manga"]
    assert (alias.target, alias.canary, registry.now.version("v3").state) == ("v1", None, AdapterState.STAGED)


def test_a_rollback_without_an_earlier_version_asks_for_none_and_names_what_ends_a_canary() -> None:
    registry = Registry().register("v1", "v2")
    registry.promote("v1")
    with pytest.raises(CatalogueError, match=r"no earlier version that is not retired$"):
        changes.roll_back(registry.now, "manga")
    registry.promote("v2", percent=5)
    with pytest.raises(CatalogueError, match=r"not retired; to end its canary, end-canary$"):
        changes.roll_back(registry.now, "manga")


def test_a_rollback_leads_only_to_earlier_targets_so_that_it_skips_no_evaluation() -> None:
    registry = Registry().register("v1", "v2", "v3")
    registry.promote("v1")
    registry.promote("v2")
    with pytest.raises(CatalogueError, match="never led to 'v3'; allowed: v1; to lead it elsewhere, promote"):
        changes.roll_back(registry.now, "manga", to="v3")
    with pytest.raises(CatalogueError, match="not registered"):
        changes.roll_back(registry.now, "manga", to="nobody")
    registry.append(changes.roll_back(registry.now, "manga", to="v1"))
    assert registry.now.aliases["manga"].target == "v1"


def test_a_canary_needs_a_version_for_the_other_sessions() -> None:
    registry = Registry().register("v1")
    with pytest.raises(CatalogueError, match="'manga' leads nowhere yet"):
        registry.promote("v1", percent=10)


def test_what_an_alias_leads_to_is_not_retired() -> None:
    registry = Registry().register("v1", "v2")
    registry.promote("v1")
    registry.promote("v2", percent=10)
    with pytest.raises(CatalogueError, match="manga leads to; promote another version first"):
        changes.retire(registry.now, "v1")
    with pytest.raises(CatalogueError, match=r"manga leads to; end its canary \(end-canary\) first"):
        changes.retire(registry.now, "v2")


@pytest.mark.parametrize("name", ["", "a/b", "../x", "-x", "x" * 129, "ä", "a b"])
def test_a_name_that_is_not_allowed_is_refused(name: str) -> None:
    with pytest.raises(CatalogueError, match="allowed"):
        changes.register(Catalogue(), name, verified(), base_model="demo", location="/x")


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"event":"exploded"}', b'{"event":"promoted"}'])
def test_an_event_that_is_not_understood_changes_nothing(data: bytes) -> None:
    with pytest.raises(CatalogueError):
        apply(Catalogue(), data, number=1, author="ann", at=0.0)


def test_events_come_in_order_without_gaps() -> None:
    registry = Registry().register("v1")
    with pytest.raises(CatalogueError, match="does not follow"):
        apply(registry.now, registry.events[0], number=7, author="ann", at=0.0)


NAMES, ALIASES = st.sampled_from("abcde"), st.sampled_from(["one", "two"])


class Machine(RuleBasedStateMachine):
    """The registry's invariants hold for any order of changes."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = Registry()
        self.engine_ids: dict[str, int] = {}
        self.contents: dict[str, str] = {}

    def attempt(self, change: Any, *arguments: Any, **options: Any) -> None:
        before = self.registry.now
        try:
            event = change(self.registry.now, *arguments, **options)
        except CatalogueError:
            assert self.registry.now is before
            return
        if event is not None:
            self.registry.append(event)

    @rule(name=NAMES, content=st.sampled_from("xy"))
    def register(self, name: str, content: str) -> None:
        self.attempt(changes.register, name, verified(content), base_model="demo", location="/")

    @rule(name=NAMES, alias=st.none() | ALIASES, percent=st.sampled_from([1.0, 30.0, 100.0]))
    def promote(self, name: str, alias: str | None, percent: float) -> None:
        self.attempt(changes.promote, name, alias=alias, percent=percent, force=True)

    @rule(alias=ALIASES)
    def roll_back(self, alias: str) -> None:
        self.attempt(changes.roll_back, alias)

    @rule(alias=ALIASES)
    def end_canary(self, alias: str) -> None:
        self.attempt(changes.end_canary, alias)

    @rule(name=NAMES)
    def retire(self, name: str) -> None:
        self.attempt(changes.retire, name)

    @rule(name=NAMES, pinned=st.booleans())
    def pin(self, name: str, pinned: bool) -> None:
        self.attempt(changes.pin, name, pinned)

    @invariant()
    def versions_never_change(self) -> None:
        for name, version in self.registry.now.versions.items():
            assert self.engine_ids.setdefault(name, version.engine_id) == version.engine_id
            assert self.contents.setdefault(name, version.sha256) == version.sha256

    @invariant()
    def engine_ids_are_never_shared(self) -> None:
        assert len(set(self.engine_ids.values())) == len(self.engine_ids)

    @invariant()
    def an_alias_leads_only_to_what_is_served(self) -> None:
        now = self.registry.now
        for alias in now.aliases.values():
            for fraction in (0.0, 0.5, 0.999):
                name = alias.resolve(fraction)
                assert name is None or now.version(name).state in (AdapterState.ACTIVE, AdapterState.CANARY)

    @invariant()
    def a_canary_stands_behind_an_alias(self) -> None:
        for version in self.registry.now.versions.values():
            if version.state is AdapterState.CANARY:
                assert self.registry.now.named_by(version.adapter_id)

    @invariant()
    def the_events_alone_give_the_same_catalogue(self) -> None:
        again = Catalogue()
        for number, event in enumerate(self.registry.events, 1):
            again = apply(again, event, number=number, author="ann", at=1.0)
        assert again == self.registry.now


Machine.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestMachine = Machine.TestCase


def test_a_promotion_that_changes_nothing_is_no_event() -> None:
    registry = Registry().register("v1", "v2")
    registry.promote("v1")
    assert changes.promote(registry.now, "v1", alias="manga") is None
    registry.promote("v2", percent=10)
    assert changes.promote(registry.now, "v2", alias="manga", percent=10) is None
    assert changes.promote(registry.now, "v2", alias="manga", percent=20) is not None
    assert changes.promote(registry.now, "v1", alias="manga") is not None, "which ends the canary"
    assert changes.promote(registry.now, "v1", alias=None) is None
