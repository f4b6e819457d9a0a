from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from budgeting.token_cache import ENTRY_BYTES, TokenCache

SIZE = 1_000 - ENTRY_BYTES


def test_the_cache_returns_only_what_was_stored() -> None:
    cache: TokenCache[str] = TokenCache(32_000)
    cache.put("a", "one", SIZE)
    assert (cache.get("a"), cache.get("b")) == ("one", None)
    assert cache.get_all(["b", "a"]) == [None, "one"]
    assert (len(cache), cache.bytes) == (1, 1_000)


def test_a_value_stays_as_it_was_first_kept() -> None:
    cache: TokenCache[str] = TokenCache(32_000)
    cache.put("a", "one", SIZE)
    cache.put("a", "two", SIZE)
    assert (cache.get("a"), cache.bytes) == ("one", 1_000)


def test_a_used_entry_outlives_an_unused_one() -> None:
    cache: TokenCache[int] = TokenCache(32_000)
    cache.put("used", 0, SIZE)
    cache.put("unused", 0, SIZE)
    for number in range(100):
        assert cache.get_all(["used"] if number % 2 else ["never", "used"])[-1] == 0
        cache.put(number, number, SIZE)
    assert cache.get("unused") is None
    assert cache.get(99) == 99


def test_an_entry_that_would_push_out_many_others_is_not_kept() -> None:
    cache: TokenCache[int] = TokenCache(32_000)
    cache.put("small", 1, SIZE)
    cache.put("large", 1, 2_001)
    assert cache.get_all(["large", "small"]) == [None, 1]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3_000)), max_size=200))
def test_the_bound_always_holds(entries: list[tuple[int, int]]) -> None:
    cache: TokenCache[int] = TokenCache(20_000)
    for key, size in entries:
        cache.put(key, key, size)
        assert cache.bytes <= 20_000
        assert cache.get(key) in (key, None)


def test_threads_share_a_cache() -> None:
    cache: TokenCache[int] = TokenCache(50_000)

    def work(start: int) -> bool:
        for number in range(start, start + 2_000):
            key = number % 97
            cache.put(key, key, SIZE)
            if cache.get(key) not in (key, None):
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    assert cache.bytes <= 50_000
