"""A model of a pool: the configured one, or one that its workers list."""

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Protocol

from gateway.backends.port import Work
from gateway.backends.workers.inspection import ServedModel
from gateway.backends.workers.tokenizer_check import TokenizerCheck
from gateway.backends.workers.worker_tokens import Ask


@dataclass(frozen=True, slots=True)
class ModelReading:
    """How the gateway reads a model: its tokens' bytes, and the check for workers with the same tokenizer.

    ``learn`` takes each request sent as messages, and the prompt tokens that a worker reported for it.
    """

    token_bytes: Callable[[int], bytes]
    check: TokenizerCheck | None = None
    learn: Callable[[Work, int], None] | None = None


class ReadModel(Protocol):
    """Makes a model known to the gateway: prompts for it can be counted and planned from then on."""

    async def __call__(self, found: ServedModel, length: int | None, ask: Ask | None) -> ModelReading:
        """Read a model. ``length``: the shortest that a worker lists, in tokens; ``None``: none lists one.

        ``ask`` asks a worker that serves the model; ``None``: the workers have no tokenizer to ask.
        """


class PoolModel:
    """One model of a pool: its length is the shortest that its workers list.

    Args:
        model: the model's id; the pool's name until a worker lists a model.
        known: whether ``model`` is a model's id.
        reading: the reading of a configured model, used until a worker lists it.
    """

    def __init__(
        self,
        model: str,
        read: ReadModel | None,
        reading: ModelReading | None = None,
        *,
        known: bool = True,
    ) -> None:
        self.id = model
        self.known = known
        self.reading = reading
        self._read = read
        self._lengths: dict[str, int | None] = {}  # by worker URL, so bounded by their number
        self._adopted: tuple[str, int | None, str | None] | None = None

    @property
    def lengths(self) -> Set[int]:
        """The lengths that its workers list."""
        return {one for one in self._lengths.values() if one}

    async def listed(self, url: str, found: ServedModel, ask: Ask | None = None) -> None:
        """Record that a worker lists the model. For ``ask`` see :class:`ReadModel`."""
        self._lengths[url] = found.max_model_len
        length = min(self.lengths, default=None)
        adopted = (found.id, length, found.root)
        if self._read is not None and adopted != self._adopted:
            self.reading = await self._read(found, length, ask)
            self._adopted = adopted
        self.id, self.known = found.id, True

    def gone(self, url: str) -> None:
        """Record that a worker no longer lists the model."""
        self._lengths.pop(url, None)
