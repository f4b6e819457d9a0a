"""The frames between the gateway's process and the engine's process: length-prefixed msgpack.

The gateway sends commands (``StartEngine`` first), the engine sends events (``Started`` or ``StartFailed``,
then one ``StepOutputs`` per step, one ``AdapterSettled`` per adapter command, ``Died`` if the engine fails).
Each side ends by closing the socket.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from engine.values import EngineConfig, EngineInfo, EngineSignals, GenerationRequest, SequenceOutput

_LENGTH_BYTES = 4


class StartEngine(msgspec.Struct, frozen=True, tag=True):
    """Command: load this model."""

    config: EngineConfig


class Add(msgspec.Struct, frozen=True, tag=True):
    """Command: add this request."""

    request: GenerationRequest


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Command: abort this request."""

    request_id: str


class AdapterCommand(msgspec.Struct, frozen=True, tag=True):
    """Command: load the adapter in the folder ``path``, or without a path unload it: no new request may name
    it. The answer repeats ``call``.
    """

    call: int
    adapter_id: str
    path: str | None = None


class Started(msgspec.Struct, frozen=True, tag=True):
    """Event: the engine is ready."""

    info: EngineInfo


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """Event: the engine could not start, and the process ends; ``code`` is the error's code."""

    code: str
    message: str


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """Event: all outputs of one step, and the state after it."""

    outputs: tuple[SequenceOutput, ...]
    signals: EngineSignals


class AdapterSettled(msgspec.Struct, frozen=True, tag=True):
    """Event: an adapter command is done; ``code`` is the error's code if it failed."""

    call: int
    code: str | None = None
    message: str = ""


class Died(msgspec.Struct, frozen=True, tag=True):
    """Event: the engine failed and the process ends."""

    message: str


Command = StartEngine | Add | Abort | AdapterCommand
Event = Started | StartFailed | StepOutputs | AdapterSettled | Died


def encode(message: Command | Event) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


class FrameReader:
    """Decodes a byte stream into the messages of one direction. Raises MsgspecError if it has any other."""

    def __init__(self, message_type: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(message_type)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that ``data`` completes."""
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _LENGTH_BYTES:
            body = start + _LENGTH_BYTES
            length = int.from_bytes(self._buffer[start:body], "big")
            if len(self._buffer) < body + length:
                break
            start = body + length
            yield self._decoder.decode(self._buffer[body:start])
        del self._buffer[:start]
