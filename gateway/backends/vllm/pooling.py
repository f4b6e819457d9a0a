"""vLLM's pooling runner in process, as a backend that makes vectors."""

import asyncio
from dataclasses import dataclass
from itertools import count
from typing import ClassVar, Final

from gateway.backends.embedded_vectors import EncodePart, check_inputs, generates_nothing, longest_input
from gateway.backends.port import Completion, Continue, DeltaSink, EmbedPart, Vectors, Work
from gateway.backends.vllm.backend import OnVllm
from gateway.contracts.features import Feature

_NUMBERS: Final = count()


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmPoolingBackend(OnVllm):
    """Makes vectors on vLLM in the gateway's process tree; generates nothing.

    Args:
        encode: tokenizes the inputs.
    """

    continues: ClassVar[frozenset[Continue]] = frozenset()
    features: ClassVar[frozenset[Feature]] = frozenset()
    generates: ClassVar = False

    encode: EncodePart

    async def generate(self, work: Work, out: DeltaSink) -> Completion:
        raise generates_nothing(self.name)

    async def embed(self, part: EmbedPart) -> Vectors:
        engine = self.running()
        longest = longest_input(part, engine.shape.max_model_len)
        inputs = [tuple(ids[:longest]) for ids in await self.encode(part)]
        check_inputs(part, inputs, engine.shape.max_model_len)
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
