"""The adapter registry: what its file may say, what it knows, and leases that never leak."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.catalogue import AdapterState, Alias
from adapters.errors import RegistryFileError, UnknownAdapter
from adapters.registry import AdapterRegistry
from adapters.selection import AdapterOffer, Lease
from adapters.values import Adapter, Selection, SelectionRule
from gateway.config.adapters_file import read_registry_file
from gateway.config.yaml_file import MAX_FILE_BYTES
from tests.adapters.crafted import registry_of

MANGA = Adapter("manga_domain_v3", 3, "demo", "adapters/manga")
STYLE = Adapter("jp_style_v1", 1, "demo", "adapters/style")

GOOD = """
adapters:
  - {id: manga_domain_v3, engine_id: 7, base_model: demo, path: adapters/manga, labels: {domain: manga}}
  - {id: jp_style_v1, base_model: demo, path: models/adapters/style}
  - {id: support_v2, base_model: demo, path: /srv/support}
aliases: {manga_domain: manga_domain_v3}
"""


def registry() -> AdapterRegistry:
    return registry_of((MANGA, STYLE), {"manga_domain": "manga_domain_v3"})


def read(folder: Path, text: str | bytes) -> AdapterRegistry:
    file = folder / "adapters.yaml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    content = read_registry_file(file)
    return registry_of(content.adapters, content.aliases)


def test_a_file_becomes_adapters_in_its_order(tmp_path: Path) -> None:
    known = read(tmp_path, GOOD).known
    assert [adapter.adapter_id for adapter in known] == ["manga_domain_v3", "jp_style_v1", "support_v2"]
    assert known[0] == Adapter("manga_domain_v3", 7, "demo", "adapters/manga", {"domain": "manga"})


def test_a_name_that_workers_list_too_is_the_registrys() -> None:
    known = registry()
    theirs = Adapter("theirs", 0, "demo", "", at=frozenset({"gpus"}))
    known.list_at_workers([theirs, *(replace(theirs, adapter_id=one) for one in sorted(known.ids))])
    assert known.listed == (theirs,) and known.get("theirs") is theirs
    assert known.get("manga_domain_v3") is MANGA and known.get("manga_domain") is MANGA
    known.offer(AdapterOffer())
    assert {one.adapter_id for one in known.listed} == {
        "theirs",
        "manga_domain_v3",
        "jp_style_v1",
        "manga_domain",
    }
    known.list_at_workers([])
    assert not known.ids


def test_adapters_without_a_number_get_the_next_ones_above_all_given(tmp_path: Path) -> None:
    assert [adapter.engine_id for adapter in read(tmp_path, GOOD).known] == [7, 8, 9]


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "adapters: []\n"])
def test_a_file_without_adapters_is_an_empty_registry(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text).known == ()


A = "{id: a, base_model: demo, path: p}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "- a list",
            "the file: Input should be a valid dictionary; given: an array of 1 item",
        ),
        ("adaptors: []", "unknown key 'adaptors' (did you mean 'adapters'?); allowed: adapters, aliases"),
        ("adapters: {}", "adapters: Input should be a valid list; given: an object"),
        ("adapters: [x]", "adapters[0]: Input should be a valid dictionary"),
        ("adapters: [{id: a, path: p}]", "adapters[0].base_model: Field required"),
        (
            "adapters: [{id: a, base_model: demo, path: ''}]",
            "adapters[0].path: String should have at least 1 character",
        ),
        (
            'adapters: [{id: a, base_model: demo, path: "a\\0b"}]',
            "line 1: not valid YAML: a text with the character U+0000",
        ),
        (
            "adapters: [{id: 'a b', base_model: demo, path: p}]",
            "adapters[0].id: String should match pattern",
        ),
        ("adapters: [{id: ../a, base_model: demo, path: p}]", "given: '../a'"),
        (
            "adapters: [{id: 7, base_model: demo, path: p}]",
            "adapters[0].id: Input should be a valid string; given: 7",
        ),
        (
            "adapters: [{id: a, base_model: demo, path: p, engine_id: 0}]",
            "adapters[0].engine_id: Input should be greater than or equal to 1; given: 0",
        ),
        (
            "adapters: [{id: a, base_model: demo, path: p, engine_id: '1'}]",
            "adapters[0].engine_id: Input should be a valid integer; given: '1'",
        ),
        (
            "adapters: [{id: a, base_model: demo, path: p, rank: 8}]",
            "unknown key 'adapters[0].rank'; allowed: base_model, ",
        ),
        (
            "adapters: [{id: a, base_model: demo, path: p, labels: {id: 1}}]",
            "adapters[0].labels.id: Input should be a valid string; given: 1",
        ),
        (f"adapters: [{A}, {A}]", "adapters[1].id: 'a' is used by adapters[0]"),
        (
            "adapters:\n- {id: a, base_model: d, path: p, engine_id: 1}\n"
            "- {id: b, base_model: d, path: p, engine_id: 1}",
            "adapters[1].engine_id: 1 is used by adapters[0]",
        ),
        (
            f"adapters: [{A}, {{id: b, base_model: d, path: p, engine_id: 2147483647}}]",
            "engine_id: give every adapter a number",
        ),
        (f"adapters: [{A}]\naliases: {{b: c}}", "aliases.b: 'c' is no adapter's id; known: a"),
        (
            f"adapters: [{A}]\naliases: {{a: a}}",
            "aliases.a: an alias is no adapter's id",
        ),
        (
            f"adapters: [{A}]\naliases: {{b: a, c: b}}",
            "aliases.c: 'b' is no adapter's id; known: a",
        ),
        (f"adapters: [{A}]\naliases: {{'b b': a}}", "aliases.b b: String should match pattern"),
        (
            "aliases: {b: a}",
            "aliases.b: 'a' is no adapter's id; known: none, the file has no adapters",
        ),
        (f"adapters: [{A}]\naliases: {{b: a, b: a}}", "the key 'b' is given twice"),
        ("adapters: [}", "line 1: not valid YAML"),
        ("adapters: !!python/object/apply:os.system [ls]", "not valid YAML"),
        ("[" * 1000, "not valid YAML"),
        (b"adapters: \xff\xfe", "byte 10 is not UTF-8"),
        (b"#" * (MAX_FILE_BYTES + 1), "longer than 1,048,576 bytes"),
    ],
)
def test_a_wrong_file_is_refused_with_the_key_what_was_given_and_what_is_allowed(
    tmp_path: Path, text: str | bytes, said: str
) -> None:
    with pytest.raises(RegistryFileError) as caught:
        read(tmp_path, text)
    assert str(tmp_path / "adapters.yaml") in str(caught.value)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        RegistryFileError, match=r"^adapters\.file: .*nowhere.yaml: cannot be read: No such file"
    ):
        read_registry_file(tmp_path / "nowhere.yaml")


def test_a_long_wrong_value_is_not_repeated_whole(tmp_path: Path) -> None:
    with pytest.raises(RegistryFileError) as caught:
        read(tmp_path, f"adapters: [{{id: {'x' * 5000}, base_model: d, path: p}}]")
    assert len(str(caught.value)) < 400


@given(st.binary(max_size=200))
def test_any_bytes_are_a_registry_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("any")
    try:
        read(folder, data)
    except RegistryFileError as error:
        assert "adapters.yaml" in str(error)


def test_names_and_aliases_lead_to_the_adapter() -> None:
    assert registry().get("manga_domain_v3") is MANGA
    assert registry().get("manga_domain") is MANGA
    assert registry().ids == {"manga_domain_v3", "jp_style_v1", "manga_domain"}


def test_what_a_routing_may_name_is_what_callers_get_or_will_when_the_file_is_taken_in() -> None:
    adapters = registry()
    servable = adapters.servable
    adapters.expect(["coming", "manga_domain_v3", "refused"])
    adapters.offer(
        AdapterOffer(
            {"manga_domain_v3": MANGA, "new": MANGA, "gone": MANGA},
            {
                "manga_domain_v3": AdapterState.ACTIVE,
                "new": AdapterState.STAGED,
                "gone": AdapterState.RETIRED,
            },
            {"manga_domain": Alias("manga_domain", "manga_domain_v3"), "empty": Alias("empty", None)},
            {"refused": "not_finite: NaN"},
        )
    )
    assert set(servable) == {"manga_domain_v3", "manga_domain", "coming"}
    assert {"new", "coming", "refused"} <= adapters.ids and "gone" not in adapters.ids


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        UnknownAdapter, match="'nope' is not registered; known: jp_style_v1, manga_domain, manga"
    ):
        registry().get("nope")


def test_a_lease_counts_the_adapter_as_in_use_under_its_own_name() -> None:
    adapters = registry()
    with adapters.lease(Selection("manga_domain")) as first, adapters.lease(Selection("manga_domain_v3")):
        assert first == Lease(MANGA, "explicit")
        assert adapters.leased() == {"manga_domain_v3": 2}
    assert adapters.leased() == {}


def test_the_base_model_is_leased_without_a_count() -> None:
    adapters = registry()
    with adapters.lease(Selection(None)) as lease:
        assert lease == Lease(None, "none")
        assert adapters.leased() == {}


@pytest.mark.parametrize(
    "selection", [Selection("nope"), Selection(None, (SelectionRule({}, "nope"),)), Selection("")]
)
def test_a_lease_of_an_unknown_adapter_is_refused_and_counts_nothing(selection: Selection) -> None:
    adapters = registry()
    with pytest.raises(UnknownAdapter), adapters.lease(selection):
        raise AssertionError("the block runs without a lease")
    assert adapters.leased() == {}


def test_an_exception_gives_the_lease_back() -> None:
    adapters = registry()
    with pytest.raises(KeyError), adapters.lease(Selection("jp_style_v1")):
        raise KeyError
    assert adapters.leased() == {}


async def test_a_cancellation_gives_the_lease_back() -> None:
    adapters, begun = registry(), asyncio.Event()

    async def work() -> None:
        with adapters.lease(Selection("jp_style_v1")):
            begun.set()
            await asyncio.sleep(3600)

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(work())
        await begun.wait()
        assert adapters.leased() == {"jp_style_v1": 1}
        task.cancel()
    assert adapters.leased() == {}


@given(
    st.lists(st.tuples(st.sampled_from(["manga_domain_v3", "jp_style_v1", "manga_domain"]), st.booleans()))
)
def test_leases_in_use_are_always_those_taken_and_not_given_back(steps: list[tuple[str, bool]]) -> None:
    adapters = registry()
    out = []
    for name, give_back in steps:
        lending = adapters.lease(Selection(name))
        lending.__enter__()
        out.append(lending)
        if give_back:
            out.pop(0).__exit__(None, None, None)
        assert sum(adapters.leased().values()) == len(out)
        assert 0 not in adapters.leased().values()
    for lending in out:
        lending.__exit__(None, None, None)
    assert adapters.leased() == {}
