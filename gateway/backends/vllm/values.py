"""A loaded vLLM's limits and adapters, in terms that do not depend on its version."""

from dataclasses import dataclass

from gateway.backends.host import EngineFacts


@dataclass(frozen=True, slots=True)
class Lora:
    """A loaded adapter: the name that metrics show, vLLM's integer for these weights, and their folder."""

    name: str
    number: int
    path: str

    @property
    def key(self) -> str:
        """The name given to vLLM: unique to these weights, since it is part of the key of cached blocks."""
        return f"{self.name}#{self.number}"


def name_of(key: str) -> str:
    """The adapter's name out of :attr:`Lora.key`."""
    return key.rpartition("#")[0]


@dataclass(frozen=True, slots=True)
class EngineShape(EngineFacts):
    """The limits of a loaded vLLM; ``pools``: it makes vectors and does not generate.

    ``takes_seeds``: false where a seeded prompt that is computed in parts would end vLLM (0.32 on a CPU).

    ``speculates``: vLLM refuses ``min_p`` and ``logit_bias`` then.

    Each of its data-parallel ``engines`` has ``max_num_seqs`` and ``total_blocks`` of its own.
    """

    max_num_seqs: int = 0
    engines: int = 1
    max_loras: int = 0
    takes_images: bool = False
    pools: bool = False
    takes_seeds: bool = True
    speculates: bool = False
