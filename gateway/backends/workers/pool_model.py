"""The model of a pool: the configured one, or what its workers say that they serve."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.backends.port import Work
from gateway.backends.workers.in_service import WorkersInService
from gateway.backends.workers.inspection import ServedModel, offer_of
from gateway.backends.workers.tokenizer_check import TokenizerCheck
from gateway.backends.workers.worker_tokens import Ask


@dataclass(frozen=True, slots=True)
class ModelReading:
    """How the gateway reads a model: its tokens' bytes, and the check for workers with the same tokenizer.

    ``learn`` gets each request that went as messages, and the prompt tokens that a worker reported for it.
    """

    token_bytes: Callable[[int], bytes]
    check: TokenizerCheck | None = None
    learn: Callable[[Work, int], None] | None = None


class ReadModel(Protocol):
    """Makes a model known to the gateway: prompts for it can be counted and planned from then on."""

    async def __call__(self, found: ServedModel, length: int | None, ask: Ask | None) -> ModelReading:
        """``length`` is the shortest of the workers', in tokens; ``None`` where none reports one.

        ``ask`` reaches a worker that serves the model; ``None``: they are known to have no tokenizer to ask.
        """


class PoolModel:
    """Follows what the workers of one pool list.

    Args:
        configured: the model's id; ``None``: the workers say it. Until then the id is the pool's ``name``.
        presence: knows the workers in service.
        ask: reaches one of them; see :class:`ReadModel`.
        reading: of the configured model, until a worker lists it.
    """

    def __init__(
        self,
        name: str,
        configured: str | None,
        read: ReadModel | None,
        presence: WorkersInService,
        ask: Ask | None = None,
        reading: ModelReading | None = None,
    ) -> None:
        self.id = configured or name
        self.configured = configured
        self.reading = reading
        self._read = read
        self._presence = presence
        self._ask = ask
        self._lengths: dict[str, int | None] = {}  # by worker, so bounded as they are
        self._adopted: tuple[str, int | None, str | None] | None = None
        self._one_at_a_time = asyncio.Lock()

    async def listed(self, url: str, models: Sequence[ServedModel] | None) -> str | None:
        """Take a worker's list; why the worker cannot be used, if so, as the end of a sentence."""
        async with self._one_at_a_time:
            return await self._take(url, models)

    async def _take(self, url: str, models: Sequence[ServedModel] | None) -> str | None:
        found = offer_of(models, self.configured)
        if found is None:
            return None
        if isinstance(found, str):
            self._lengths.pop(url, None)
            return found
        if found.id != self.id:
            if any(one != url and one in self._lengths for one in self._presence.serving):
                return f"serves {found.id}, and the pool's other workers {self.id}; give each its own backend"
            self._lengths.clear()
        self._lengths[url] = found.max_model_len
        length = min((one for one in self._lengths.values() if one), default=None)
        adopted = (found.id, length, found.root)
        if self._read is not None and adopted != self._adopted:
            self.reading = await self._read(found, length, self._ask)
            self._adopted = adopted
        self.id = found.id
        return None
