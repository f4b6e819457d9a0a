"""The pool of KV blocks: who owns which block. It knows ids and reference counts, never tensors.

Block 0 is the null block: it belongs to nobody, stays zero, and fills the unused end of a block table, so
that a padded gather reads something finite. Ids 1 to ``num_blocks`` are handed out.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

NULL_BLOCK = 0


class BlockPool:
    """Fixed-size blocks with reference counts.

    Free blocks are a stack: what was given back last is used first, while it is still in the processor's
    cache, and memory that no request has needed yet is never touched.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks, NULL_BLOCK, -1))
        self._references = [0] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        """Blocks that an allocation can have now."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return 1.0 - self.num_free / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` free blocks, each with one reference. Raises ValueError when there are fewer."""
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each of ``blocks``, which must be in use."""
        for block in blocks:
            if self._references[block] == 0:
                raise ValueError(f"block {block} is free and cannot be shared")
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drops a reference to each of ``blocks``; those without any become free."""
        for block in reversed(blocks):
            if self._references[block] == 0:
                raise ValueError(f"block {block} is free already")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless ``tables``, all block tables there are, explain every reference.

        free + in use = all; no block is free and in use; none is free twice; the null block is never handed
        out.
        """
        owned = Counter(block for table in tables for block in table)
        free = set(self._free)
        used = {block for block, count in enumerate(self._references) if count}
        problems = {
            "a block is free twice": len(free) != len(self._free),
            "the null block was handed out": NULL_BLOCK in free or NULL_BLOCK in used,
            "a block is free and in use": bool(free & used),
            "a block is lost": len(free) + len(used) != self.num_blocks,
            "references and tables differ": owned != {block: self._references[block] for block in used},
        }
        found = [problem for problem, present in problems.items() if present]
        if found:
            raise AssertionError("block pool: " + "; ".join(found))
