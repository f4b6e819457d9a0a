"""The block pool: the reference count of each block is the number of its owners."""

import pytest

from engine.block_pool import NULL_BLOCK, BlockPool


def test_a_new_pool_is_all_free_and_never_hands_out_the_null_block() -> None:
    pool = BlockPool(8, 16)
    blocks = pool.allocate(8)
    assert sorted(blocks) == list(range(1, 9))
    assert NULL_BLOCK not in blocks
    assert pool.num_free == 0
    assert pool.usage == 1.0
    pool.check_integrity([blocks])


def test_tokens_are_rounded_up_to_whole_blocks() -> None:
    pool = BlockPool(8, 16)
    assert [pool.blocks_for(count) for count in (0, 1, 16, 17, 32, 33)] == [0, 1, 1, 2, 2, 3]


def test_a_released_block_is_used_again_first() -> None:
    pool = BlockPool(8, 16)
    first = pool.allocate(2)
    pool.release(first)
    assert pool.allocate(2) == first


def test_a_shared_block_is_free_only_when_the_last_owner_releases_it() -> None:
    pool = BlockPool(4, 16)
    table = pool.allocate(2)
    pool.share(table)
    pool.check_integrity([table, table])
    pool.release(table)
    assert pool.num_free == 2
    pool.release(table)
    assert pool.num_free == 4
    pool.check_integrity([])


def test_asking_for_more_than_is_free_takes_nothing() -> None:
    pool = BlockPool(2, 16)
    with pytest.raises(ValueError, match="3 blocks asked for, 2 free"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_releasing_or_sharing_a_free_block_is_refused() -> None:
    pool = BlockPool(2, 16)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(ValueError, match="free already"):
        pool.release(blocks)
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share(blocks)


def test_the_integrity_check_sees_a_table_without_a_reference_and_a_reference_without_a_table() -> None:
    pool = BlockPool(4, 16)
    table = pool.allocate(1)
    with pytest.raises(AssertionError, match="references and tables differ"):
        pool.check_integrity([table, table])
    with pytest.raises(AssertionError, match="references and tables differ"):
        pool.check_integrity([])
