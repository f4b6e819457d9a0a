"""A model of a pool: the configured one, or one that its workers list."""

from collections.abc import Awaitable, Callable, Set
from dataclasses import dataclass, field
from typing import Final

from gateway.backends.port import Work
from gateway.backends.workers.inspection import ServedModel
from gateway.backends.workers.tokenizer_check import TokenizerCheck
from gateway.backends.workers.worker_tokens import Ask

# Servers that complete a last message of the assistant, as they name themselves in their lists of models.
_COMPLETING: Final = frozenset({"vllm", "sglang"})


@dataclass(frozen=True, slots=True)
class ModelReading:
    """How the gateway reads a model: its tokens' bytes, and the check for workers with the same tokenizer.

    ``learn`` takes each request sent as messages, and the prompt tokens that a worker reported for it.
    """

    token_bytes: Callable[[int], bytes]
    check: TokenizerCheck | None = None
    learn: Callable[[Work, int], None] | None = None


ReadModel = Callable[[ServedModel, int | None, Ask | None], Awaitable[ModelReading]]
"""Makes a model known to the gateway: prompts for it can be counted and planned from then on.

It takes the shortest length in tokens that a worker lists, ``None`` if none lists one, and the function that
asks a worker of the model, ``None`` if the workers have no tokenizer.
"""


@dataclass(slots=True)
class PoolModel:
    """One model of a pool: its length is the shortest that its workers list.

    Args:
        id: the model's id; the pool's name until a worker lists a model.
        known: whether ``id`` is a model's id.
        reading: the reading of a configured model, used until a worker lists it.
    """

    id: str
    read: ReadModel | None
    reading: ModelReading
    known: bool = True
    _listed: dict[str, ServedModel] = field(default_factory=dict)  # by worker URL, so bounded
    _adopted: tuple[str, int | None, str | None] | None = None

    @property
    def lengths(self) -> Set[int]:
        return {one.length for one in self._listed.values() if one.length}

    @property
    def completes(self) -> bool:
        """Whether its workers are known to complete a message (``continue_final_message``)."""
        return bool(self._listed) and _COMPLETING.issuperset(self._owners)

    @property
    def ignores_ending(self) -> bool:
        """Whether a worker would ignore a caller's own ``continue_final_message``; a Sluice refuses it."""
        return not self._owners <= _COMPLETING | {"sluice"}

    @property
    def _owners(self) -> Set[str | None]:
        return {one.owned_by for one in self._listed.values()}

    async def listed(self, url: str, found: ServedModel, ask: Ask | None = None) -> None:
        """Record that a worker lists the model. For ``ask`` see :class:`ReadModel`."""
        self._listed[url] = found
        length = min(self.lengths, default=None)
        adopted = (found.id, length, found.root)
        if self.read is not None and adopted != self._adopted:
            self.reading = await self.read(found, length, ask)
            self._adopted = adopted
        self.id, self.known = found.id, True

    def gone(self, url: str) -> None:
        self._listed.pop(url, None)
