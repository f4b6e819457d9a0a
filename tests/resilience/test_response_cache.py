"""The response cache: exact, bounded in number and age, and no key shared by two requests."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from resilience.response_cache import ResponseCache, cache_key


@dataclass
class Clock:
    """A clock that is set by hand."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_was_put_is_got_and_nothing_else() -> None:
    cache: ResponseCache[str] = ResponseCache(2, 10.0, Clock())
    cache.put("a", "answer")
    assert cache.get("a") == "answer"
    assert cache.get("b") is None


def test_the_least_recently_used_leaves_first() -> None:
    cache: ResponseCache[int] = ResponseCache(2, 10.0, Clock())
    cache.put("a", 1)
    cache.put("b", 2)
    cache.get("a")
    cache.put("c", 3)
    assert [cache.get(key) for key in "abc"] == [1, None, 3]


def test_an_entry_is_gone_when_its_time_is_up_and_putting_starts_a_new_time() -> None:
    clock = Clock()
    cache: ResponseCache[int] = ResponseCache(2, 10.0, clock)
    cache.put("a", 1)
    clock.now = 9.9
    assert cache.get("a") == 1
    clock.now = 10.0
    assert cache.get("a") is None
    assert len(cache) == 0
    cache.put("a", 2)
    clock.now = 19.9
    assert cache.get("a") == 2


@pytest.mark.parametrize(("capacity", "ttl_s"), [(0, 1.0), (-1, 1.0), (1, 0.0), (1, -1.0), (1, float("nan"))])
def test_bounds_that_bound_nothing_are_refused(capacity: int, ttl_s: float) -> None:
    with pytest.raises(ValueError, match="allowed"):
        ResponseCache(capacity, ttl_s, Clock())


@given(
    capacity=st.integers(1, 4),
    steps=st.lists(st.tuples(st.sampled_from(["put", "get", "wait"]), st.integers(0, 6))),
)
def test_it_is_never_larger_than_its_capacity_and_never_serves_what_is_old_or_other(
    capacity: int, steps: list[tuple[str, int]]
) -> None:
    clock = Clock()
    cache: ResponseCache[tuple[int, float]] = ResponseCache(capacity, 5.0, clock)
    for step, number in steps:
        if step == "put":
            cache.put(str(number), (number, clock.now))
            assert cache.get(str(number)) == (number, clock.now)
        elif step == "get":
            got = cache.get(str(number))
            assert got is None or (got[0] == number and clock.now - got[1] < 5.0)
        else:
            clock.now += number
        assert len(cache) <= capacity


texts = st.text(max_size=4)
requests = st.fixed_dictionaries(
    {
        "tenant": texts,
        "model": texts,
        "adapter_id": st.none() | texts,
        "prompt_version": st.none() | texts,
        "token_ids": st.lists(st.integers(0, 200_000), max_size=4),
        "sampling_repr": texts,
    }
)


@given(first=requests, second=requests)
def test_two_requests_share_a_key_only_when_they_are_equal(
    first: dict[str, object], second: dict[str, object]
) -> None:
    assume(first != second)
    assert cache_key(**first) != cache_key(**second)  # type: ignore[arg-type]
    assert cache_key(**first) == cache_key(**first)  # type: ignore[arg-type]


def test_a_boundary_between_fields_cannot_be_moved() -> None:
    def key(tenant: str, model: str, adapter_id: str | None = None) -> str:
        return cache_key(
            tenant=tenant,
            model=model,
            adapter_id=adapter_id,
            prompt_version=None,
            token_ids=(1, 2, 3),
            sampling_repr="",
        )

    keys = [key("ab", "c"), key("a", "bc"), key("abc", ""), key("ab", "c", ""), key("ab", "c", "\ud800")]
    assert len(set(keys)) == len(keys)
    assert all(len(one) == 64 for one in keys)
