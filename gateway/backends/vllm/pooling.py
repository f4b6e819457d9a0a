"""vLLM's pooling runner in process, as a backend that makes vectors."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import ClassVar, Final

from admission.values import BackendLoad
from gateway.backends.embedded_vectors import EncodePart, generates_nothing, longest_input
from gateway.backends.port import BackendState, Completion, Continue, DeltaSink, EmbedPart, Vectors, Work
from gateway.backends.vllm.signals import SignalBoard
from gateway.backends.vllm.values import LoadedEngine
from gateway.contracts.features import Feature
from resilience.failures import BackendFailure, FailureKind

_NUMBERS: Final = count()


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmPoolingBackend:
    """Makes vectors on vLLM in the gateway's process tree; generates nothing.

    Args:
        engine: the loaded engine; ``None`` while there is none.
        encode: makes token ids of texts.
    """

    kind: ClassVar = "vllm"
    continues: ClassVar[frozenset[Continue]] = frozenset()
    features: ClassVar[frozenset[Feature]] = frozenset()
    generates: ClassVar = False

    name: str
    model: str
    engine: Callable[[], LoadedEngine | None]
    state_of: Callable[[], BackendState]
    board: SignalBoard
    encode: EncodePart

    @property
    def state(self) -> BackendState:
        """The engine's state."""
        return self.state_of()

    @property
    def load(self) -> BackendLoad | None:
        """The engine's load after its last step."""
        engine = self.engine()
        return None if engine is None else self.board.load(engine.shape)

    async def generate(self, work: Work, out: DeltaSink) -> Completion:
        """Raises BackendFailure."""
        raise generates_nothing(self.name)

    async def embed(self, part: EmbedPart) -> Vectors:
        """The vectors; leaving early aborts the sequences. Raises BackendFailure."""
        engine = self.engine()
        if engine is None or self.state is not BackendState.READY:
            raise BackendFailure(FailureKind.ENGINE_DEAD, f"vLLM is {self.state.value}")
        longest = longest_input(part, engine.shape.max_model_len)
        inputs = [tuple(ids[:longest]) for ids in await self.encode(part)]
        with self.board.sequences(len(inputs)):
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(engine.embed(f"embedding {next(_NUMBERS)}", ids, part.dimensions))
                        for ids in inputs
                    ]
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
        return Vectors(tuple([task.result() for task in tasks]), sum(map(len, inputs)))
