"""The pool of KV blocks: which blocks are in use, and which one is used next. It has block ids, no tensors.

Block 0 is the null block: no sequence owns it, it stays zero, and it fills the unused end of a block table,
so that a padded gather reads finite numbers. Ids 1 to ``num_blocks`` are allocated.

    blank ──allocate──> in use ──release──> blank       its content is not needed
                          │ ▲
                   release│ │share
                          ▼ │
                        cached ──allocate──> in use     its prefix is known; evicted when no blank one is left

Blank and cached blocks are both free.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from engine.prefix_cache import PrefixCache

NULL_BLOCK = 0


class BlockPool:
    """Fixed-size blocks with reference counts.

    Blank blocks are a stack: the last released is used first, because it may still be in the processor's
    cache, and memory that no request needs is never touched. Cached blocks are evicted in the order of their
    release; of one release the last block is evicted first, since a block is useless without those before it.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.cache = PrefixCache()
        self._blank = list(range(num_blocks, NULL_BLOCK, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated now, blank or cached."""
        return len(self._blank) + len(self._cached)

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return 1.0 - self.num_free / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks``, all with a known prefix, are free."""
        return sum([block in self._cached for block in blocks])

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` free blocks, each with one reference. Raises ValueError when there are fewer."""
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} free")
        blocks = [self._blank.pop() if self._blank else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each of ``blocks``, which must be in use or cached."""
        for block in blocks:
            if self._references[block] == 0:
                if block not in self._cached:
                    raise ValueError(f"block {block} is blank and cannot be shared")
                del self._cached[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drops a reference to each of ``blocks``; those without any become free."""
        for block in reversed(blocks):
            if self._references[block] == 0:
                raise ValueError(f"block {block} is free already")
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self.cache:
                    self._cached[block] = None
                else:
                    self._blank.append(block)

    def remember(self, block: int, digest: bytes) -> None:
        """Make a full, computed block in use known by ``digest``. If another block has the same content, only
        this newer copy stays known, because it outlives the older one, which is blank once it is free.
        """
        if self._references[block] == 0:
            raise ValueError(f"block {block} is free and cannot become known")
        before = self.cache.put(digest, block)
        if before is not None and before in self._cached:
            del self._cached[before]
            self._blank.append(before)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless ``tables``, all block tables in use, explain every reference, and each
        block is exactly one of blank, cached and in use.
        """
        owned = Counter(block for table in tables for block in table)
        blank, cached = set(self._blank), set(self._cached)
        used = {block for block, count in enumerate(self._references) if count}
        problems = {
            "a block is free twice": len(self._blank) + len(cached) != len(blank | cached),
            "the null block was handed out": NULL_BLOCK in blank | cached | used,
            "a block is free and in use": bool((blank | cached) & used),
            "a block is lost": len(blank | cached | used) != self.num_blocks,
            "references and tables differ": owned != {block: self._references[block] for block in used},
            "a blank block is known": any(block in self.cache for block in blank),
            "a cached block is not known": not all(block in self.cache for block in cached),
        }
        found = [problem for problem, present in problems.items() if present]
        if found:
            raise AssertionError("block pool: " + "; ".join(found))

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self.cache.drop(block)
        return block
