"""The prefix cache: a block is found by exactly the prefix it holds, and is evicted as late as possible."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_pool import BlockPool
from engine.prefix_cache import chain_root, extend_chain
from engine.sequence import AdapterVersion

BLOCKS, BLOCK_SIZE = 8, 2


def chain(
    tokens: list[int], salt: str | None = None, adapter: AdapterVersion | None = None, block_size: int = 4
) -> list[bytes]:
    digests: list[bytes] = []
    extend_chain(digests, chain_root(salt, adapter), tokens, block_size)
    return digests


def remember(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Allocates and computes the full blocks of ``tokens``."""
    digests = chain(tokens, block_size=pool.block_size)
    blocks = pool.allocate(len(digests))
    for block, digest in zip(blocks, digests, strict=True):
        pool.remember(block, digest)
    return blocks


def find(pool: BlockPool, tokens: list[int]) -> list[int]:
    return pool.cache.find(chain(tokens, block_size=pool.block_size))


def test_only_full_blocks_have_an_identity() -> None:
    assert [len(chain([7] * length)) for length in (0, 1, 3, 4, 7, 8)] == [0, 0, 0, 1, 1, 2]


def test_an_identity_depends_on_all_tokens_before_and_on_none_after() -> None:
    first, second, third = chain([1] * 12)
    assert len({first, second, third}) == 3  # the same tokens at other places
    assert chain([1] * 8 + [2] * 4)[:2] == [first, second]
    assert chain([2] + [1] * 11)[2] != third


def test_a_chain_that_grows_token_by_token_is_the_one_made_at_once() -> None:
    tokens, grown = list(range(23)), list[bytes]()
    for length in range(len(tokens) + 1):
        extend_chain(grown, grown[-1] if grown else chain_root(None, None), tokens[:length], 4)
    assert grown == chain(tokens)


def test_different_salts_adapters_and_versions_share_no_block_identity() -> None:
    origins = [
        (None, None),
        ("", None),
        ("None", None),
        ("a', None)", None),
        ("a", None),
        ("a", AdapterVersion("a", 1)),
        ("a", AdapterVersion("a", 2)),
        ("a", AdapterVersion("a', number=1", 1)),
        (None, AdapterVersion("a", 1)),
        ("\ud800", None),
    ]
    assert len({chain([1] * 4, salt, adapter)[0] for salt, adapter in origins}) == len(origins)


@given(
    one=st.tuples(st.sampled_from([None, "x", "y"]), st.lists(st.integers(0, 2), max_size=12)),
    other=st.tuples(st.sampled_from([None, "x", "y"]), st.lists(st.integers(0, 2), max_size=12)),
)
def test_two_chains_agree_exactly_as_far_as_salt_and_tokens_do(
    one: tuple[str | None, list[int]], other: tuple[str | None, list[int]]
) -> None:
    common = 0
    while (
        one[0] == other[0]
        and (common + 1) * 4 <= min(len(one[1]), len(other[1]))
        and one[1][: (common + 1) * 4] == other[1][: (common + 1) * 4]
    ):
        common += 1
    mine, theirs = chain(one[1], one[0]), chain(other[1], other[0])
    assert mine[:common] == theirs[:common]
    assert not set(mine[common:]) & set(theirs[common:])


def test_blank_blocks_are_used_before_cached_ones_and_those_oldest_first_tail_before_head() -> None:
    pool = BlockPool(8, 4)
    old, new = remember(pool, [1] * 12), remember(pool, [2] * 8)
    plain = pool.allocate(1)
    for blocks in (old, plain, new):
        pool.release(blocks)
    assert pool.num_free == 8
    assert set(pool.allocate(3)).isdisjoint(old + new)
    assert pool.allocate(5) == [*reversed(old), *reversed(new)]
    assert find(pool, [1] * 12) == find(pool, [2] * 8) == []


def test_sharing_a_cached_block_takes_it_out_of_the_free_ones_and_makes_it_the_newest() -> None:
    pool = BlockPool(4, 4)
    first, second = remember(pool, [1] * 8), remember(pool, [2] * 8)
    pool.release(first)
    pool.release(second)
    pool.share(first)
    assert (pool.num_free, pool.count_free(first), pool.count_free(second)) == (2, 0, 2)
    pool.release(first)
    assert pool.allocate(2) == second[::-1]
    assert find(pool, [1] * 8) == first


def test_a_prefix_computed_twice_is_known_by_its_last_copy_and_the_first_becomes_blank() -> None:
    pool = BlockPool(4, 4)
    first = remember(pool, [1] * 4)
    pool.release(first)
    second = pool.allocate(1)
    pool.remember(second[0], chain([1] * 4)[0])
    assert find(pool, [1] * 4) == second
    assert pool.allocate(1) == first
    pool.check_integrity([first, second])


def test_a_copy_that_is_no_longer_known_becomes_blank_when_its_owner_leaves() -> None:
    pool = BlockPool(4, 4)
    first, second = remember(pool, [1] * 4), remember(pool, [1] * 4)
    pool.release(first)
    pool.release(second)
    pool.check_integrity([])
    assert pool.allocate(1) == first
    assert find(pool, [1] * 4) == second


class PoolMachine(RuleBasedStateMachine):
    """A pool and tables that own its blocks, against a model of what every block holds.

    ``content`` maps a block to the whole prefix up to its end, as written since the block was allocated.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, BLOCK_SIZE)
        self.tables: list[tuple[list[int], list[int]]] = []
        self.content: dict[int, tuple[int, ...]] = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8))
    def allocate(self, tokens: list[int]) -> None:
        """Adds a sequence that shares the cached blocks of its prefix and computes the rest."""
        digests = chain(tokens, block_size=BLOCK_SIZE)
        found = self.pool.cache.find(digests)
        for index, block in enumerate(found):
            assert self.content[block] == tuple(tokens[: (index + 1) * BLOCK_SIZE])
        missing = self.pool.blocks_for(len(tokens)) - len(found)
        if missing > self.pool.num_free - self.pool.count_free(found):
            return
        self.pool.share(found)
        blocks = found + self.pool.allocate(missing)
        self.tables.append((tokens, blocks))
        self.write(len(self.tables) - 1, len(found))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data: st.DataObject, token: int) -> None:
        """Adds a token to a sequence, in a new block when the last one is full."""
        at = data.draw(st.integers(0, len(self.tables) - 1))
        tokens, blocks = self.tables[at]
        if len(tokens) == len(blocks) * BLOCK_SIZE:
            if not self.pool.num_free:
                return
            blocks.extend(self.pool.allocate(1))
        tokens.append(token)
        self.write(at, (len(tokens) - 1) // BLOCK_SIZE)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """Adds a sequence that shares the full blocks of another one, without copying."""
        tokens, blocks = data.draw(st.sampled_from(self.tables))
        full = len(tokens) // BLOCK_SIZE
        if full:
            self.pool.share(blocks[:full])
            self.tables.append((tokens[: full * BLOCK_SIZE], blocks[:full]))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.tables) - 1))
        self.pool.release(self.tables.pop(at)[1])

    @rule(count=st.integers(1, BLOCKS))
    def evict(self, count: int) -> None:
        """Allocates blocks for another use and releases them without cached content."""
        blocks = self.pool.allocate(min(count, self.pool.num_free))
        for block in blocks:
            self.content[block] = ()
        self.pool.release(blocks)

    def write(self, table: int, first: int) -> None:
        tokens, blocks = self.tables[table]
        digests = chain(tokens, block_size=BLOCK_SIZE)
        for index in range(first, len(blocks)):
            self.content[blocks[index]] = tuple(tokens[: (index + 1) * BLOCK_SIZE])
            if index < len(digests):
                self.pool.remember(blocks[index], digests[index])

    @invariant()
    def every_reference_has_an_owner_and_no_block_is_lost(self) -> None:
        self.pool.check_integrity(blocks for _, blocks in self.tables)

    @invariant()
    def no_owner_sees_another_prefix_than_its_own(self) -> None:
        for tokens, blocks in self.tables:
            for index, block in enumerate(blocks):
                assert self.content[block] == tuple(tokens[: (index + 1) * BLOCK_SIZE])

    def teardown(self) -> None:
        for _, blocks in self.tables:
            self.pool.release(blocks)
        assert self.pool.num_free == BLOCKS
        self.pool.check_integrity([])


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
