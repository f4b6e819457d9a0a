"""Vectors of the embedded engine: the mean of the last hidden states, of length 1."""

from base64 import b64encode
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Final

from engine.client import EngineClient, EngineTicket, receive_any
from engine.errors import EngineDead
from engine.values import GenerationRequest, SamplingParams, SequenceEnd
from gateway.backends.embedded_failures import failure_of
from gateway.backends.port import plain_inputs
from gateway.contracts.embeddings import EmbeddingsAnswer, EmbeddingsRequest
from resilience.failures import BackendFailure, FailureKind, invalid_input

EncodePart = Callable[[EmbeddingsRequest], Awaitable[Sequence[Sequence[int]]]]
"""Makes the token ids of each input. Raises BackendFailure; RateLimited: too many of the tenant's wait."""


AT_ONCE: Final = 16
"""Most inputs of a part in the engine; all parts together then stay below the engine's ``max_waiting``."""
PRIORITY: Final = -1  # below the priority of chats, which the engine computes first
NUMBERS: Final = count()  # of the embeddings' requests to the engines in process
_UNUSED: Final = SamplingParams(max_tokens=1)


def generates_nothing(name: str) -> BackendFailure:
    return BackendFailure(FailureKind.MODEL_NOT_FOUND, f"{name} makes vectors and generates nothing")


async def inputs_of(
    part: EmbeddingsRequest, encode: EncodePart, max_model_len: int, vocab_size: int | None = None
) -> list[tuple[int, ...]]:
    """The token ids of the inputs, cut to the length that the caller asks for.

    Raises BackendFailure for the first input that is too long, or has an id outside the vocabulary.
    """
    longest = max_model_len if part.truncate_to == -1 else part.truncate_to
    inputs = [tuple(ids[:longest]) for ids in await encode(part)]
    for index, ids in enumerate(inputs):
        field = part.field(index)
        if len(ids) > max_model_len:
            message = f"{field} has {len(ids):,} tokens; allowed: at most {max_model_len:,}"
            raise BackendFailure(FailureKind.TOKEN_LIMIT_EXCEEDED, message, param=field)
        if vocab_size is not None and max(ids, default=0) >= vocab_size:
            message = f"{field} has token id {max(ids)}; allowed: 0 to {vocab_size - 1}"
            raise invalid_input(message, field)
    return inputs


async def ids_alone(part: EmbeddingsRequest) -> Sequence[Sequence[int]]:
    """The token ids of the inputs, for an engine without a tokenizer. Raises BackendFailure for texts."""
    inputs = plain_inputs(part)
    ids = [one for one in inputs if not isinstance(one, str)]
    if len(ids) < len(inputs):
        raise invalid_input("the engine takes token ids, no texts", "input")
    return ids


async def vectors_of(part: EmbeddingsRequest, client: EngineClient, encode: EncodePart) -> EmbeddingsAnswer:
    """The vectors; leaving early aborts the sequences. Raises BackendFailure, EngineError."""
    if part.dimensions is not None:
        message = f"dimensions is {part.dimensions}; allowed: null, {part.model} has vectors of one length"
        raise invalid_input(message, "dimensions")
    if (info := client.info) is None:
        raise EngineDead("the engine has not started")
    inputs = await inputs_of(part, encode, info.max_model_len, info.vocab_size)
    vectors: dict[int, str] = {}
    tokens = 0
    going: dict[EngineTicket, int] = {}
    with ExitStack() as held:
        for index, ids in enumerate(inputs):
            request = GenerationRequest(f"embedding {next(NUMBERS)}", ids, _UNUSED, PRIORITY, embed=True)
            going[held.enter_context(client.submit(request))] = index
            while going and (len(going) >= AT_ONCE or index + 1 == len(inputs)):
                for ticket, output in await receive_any(going):
                    if output.finish_reason is SequenceEnd.STOP:
                        vectors[going.pop(ticket)] = b64encode(output.embedding).decode()
                        tokens += output.prompt_tokens
                    elif output.finish_reason is not None:
                        raise failure_of(output.error or "internal", output.detail)
    return EmbeddingsAnswer(part.model, [vectors[index] for index in range(len(inputs))], tokens)
