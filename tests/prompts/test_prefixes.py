from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from admission.values import BackendLoad
from budgeting.values import Plan, SectionCounts
from gateway.prompts.prefixes import MAX_CACHED_KEYS, Prefix, PrefixWatch, fingerprint_of
from tests.scripted import ScriptedBackend

LOAD = BackendLoad(running=0, waiting=0, kv_usage=0.0, total_blocks=64, block_size=16, max_running=8)
LOCAL, OTHER = ScriptedBackend(), ScriptedBackend(name="other")


def plan(token_ids: tuple[int, ...], prefix_tokens: int) -> Plan:
    counts = SectionCounts(system=prefix_tokens, recent_turns=len(token_ids) - prefix_tokens)
    return Plan((), token_ids, counts, generation_reserve=1, prefix_tokens=prefix_tokens)


def expect(watch: PrefixWatch, sent: Plan, *, tenant: str = "acme", adapter: str | None = None) -> Prefix:
    return watch.expect(sent, LOCAL, tenant=tenant, adapter_id=adapter)


def answer(watch: PrefixWatch, sent: Plan, backend: str = LOCAL.name) -> None:
    watch.answered(expect(watch, sent), backend)


SENT = plan(tuple(range(40)), 35)


def test_only_whole_blocks_of_the_stable_prefix_count() -> None:
    prefix = expect(PrefixWatch(block_size=lambda model: 16), SENT)
    assert (prefix.tokens, prefix.expected) == (32, 0)
    assert prefix.fingerprint is not None and len(prefix.fingerprint) == 16


def test_a_prefix_without_a_whole_block_has_no_fingerprint() -> None:
    assert expect(PrefixWatch(block_size=lambda model: 16), plan(tuple(range(40)), 15)).fingerprint is None
    assert expect(PrefixWatch(block_size=lambda model: 16), plan((), 0)).tokens == 0


def test_what_a_backend_has_computed_is_expected_of_it_and_of_no_other() -> None:
    watch = PrefixWatch(block_size=lambda model: 16)
    answer(watch, SENT, OTHER.name)
    assert expect(watch, SENT).expected == 0
    answer(watch, SENT)
    assert expect(watch, SENT).expected == 32
    assert watch.expect(SENT, OTHER, tenant="acme", adapter_id=None).expected == 0


def test_tenants_and_adapters_share_nothing_unless_the_engine_lets_tenants() -> None:
    watch = PrefixWatch(block_size=lambda model: 16)
    answer(watch, SENT)
    assert expect(watch, SENT, tenant="umbra").expected == 0
    assert expect(watch, SENT, adapter="jp_style_v1").expected == 0
    shared = PrefixWatch(block_size=lambda model: 16, shared=True)
    answer(shared, SENT)
    assert expect(shared, SENT, tenant="umbra").expected == 32


def test_a_prefix_that_changes_half_way_is_expected_half() -> None:
    watch = PrefixWatch(block_size=lambda model: 16)
    answer(watch, SENT)
    assert expect(watch, plan((*range(20), *range(100, 120)), 35)).expected == 16


def test_tokens_after_the_boundary_change_nothing() -> None:
    one, two = (
        expect(PrefixWatch(block_size=lambda model: 16), plan((*range(35), *tail), 35))
        for tail in ((1,), (2, 3))
    )
    assert one == two


def test_the_fingerprint_depends_on_whole_blocks_and_on_no_tenant_or_adapter() -> None:
    watch = PrefixWatch(block_size=lambda model: 16)
    assert expect(watch, SENT, tenant="umbra", adapter="a").fingerprint == expect(watch, SENT).fingerprint
    assert fingerprint_of(SENT.token_ids, 35, 16) == expect(watch, SENT).fingerprint
    # Only whole blocks count: 35 tokens have two whole blocks of 16.
    assert fingerprint_of(SENT.token_ids, 35, 16) == fingerprint_of(tuple(range(32)), 32, 16)


def test_what_is_remembered_is_bounded_and_the_longest_unused_goes_first() -> None:
    watch = PrefixWatch(block_size=lambda model: 16, max_blocks=4)
    one, two, three = (
        msgspec.structs.replace(SENT, token_ids=tuple(range(n, n + 40))) for n in (0, 100, 200)
    )
    for sent in (one, two, one, three):
        answer(watch, sent)
    assert [expect(watch, sent).expected for sent in (one, two, three)] == [32, 0, 32]


def test_more_prefixes_than_are_cached_are_still_distinguished() -> None:
    watch = PrefixWatch(block_size=lambda model: 16)
    many = [
        msgspec.structs.replace(SENT, token_ids=tuple(range(n, n + 40))) for n in range(3 * MAX_CACHED_KEYS)
    ]
    for sent in many:
        answer(watch, sent)
    again = [expect(watch, sent) for sent in many]
    assert {prefix.expected for prefix in again} == {32}
    assert [prefix.fingerprint for prefix in again] == [fingerprint_of(one.token_ids, 35, 16) for one in many]


@given(
    prompts=st.lists(
        st.tuples(st.lists(st.integers(0, 1), max_size=12), st.integers(0, 12)), min_size=1, max_size=12
    ),
    block_size=st.sampled_from([1, 2, 3]),
)
def test_expected_is_the_longest_run_of_whole_blocks_that_any_earlier_prefix_had(
    prompts: list[tuple[list[int], int]], block_size: int
) -> None:
    watch, seen = PrefixWatch(block_size=lambda model: block_size), set[tuple[int, ...]]()
    for ids, boundary in prompts:
        sent = plan(tuple(ids), min(boundary, len(ids)))
        prefix = expect(watch, sent)
        whole = sent.token_ids[: sent.prefix_tokens // block_size * block_size]
        best = 0
        while best < len(whole) and whole[: best + block_size] in seen:
            best += block_size
        assert (prefix.tokens, prefix.expected) == (len(whole), best)
        watch.answered(prefix, LOCAL.name)
        seen |= {whole[:end] for end in range(block_size, len(whole) + 1, block_size)}


@pytest.mark.parametrize("block_size", [1, 16])
def test_the_backends_own_block_size_wins(block_size: int) -> None:
    backend = ScriptedBackend(load=msgspec.structs.replace(LOAD, block_size=block_size))
    prefix = PrefixWatch(block_size=lambda model: 8).expect(SENT, backend, tenant="acme", adapter_id=None)
    assert prefix.tokens == 35 // block_size * block_size
