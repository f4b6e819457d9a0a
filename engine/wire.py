"""The frames between the gateway's process and the engine's: length-prefixed msgpack.

Commands go down (one ``StartEngine`` first), events come up (``Started`` or ``StartFailed``, then one
``StepOutputs`` for each step, an ``AdapterSettled`` for each command about an adapter, ``Died`` if the engine
fails). Each side ends by closing the socket.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from engine.errors import EngineError
from engine.values import EngineConfig, EngineInfo, EngineSignals, GenerationRequest, SequenceOutput

_LENGTH_BYTES = 4
# The largest frame is a Start or Add: a prompt of a million tokens takes some 5 MB.
MAX_FRAME_BYTES = 64 * 1024 * 1024


class StartEngine(msgspec.Struct, frozen=True, tag=True):
    """Load this."""

    config: EngineConfig


class Add(msgspec.Struct, frozen=True, tag=True):
    """Generate this."""

    request: GenerationRequest


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Drop this."""

    request_id: str


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Load the adapter in this folder under this id; ``call`` is repeated in the answer."""

    call: int
    adapter_id: str
    path: str


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Let no new request name this adapter."""

    call: int
    adapter_id: str


class Started(msgspec.Struct, frozen=True, tag=True):
    """The engine is ready."""

    info: EngineInfo


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not start, and the process ends; ``code`` is that of the error."""

    code: str
    message: str


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """Everything one step brought."""

    outputs: tuple[SequenceOutput, ...]
    signals: EngineSignals


class AdapterSettled(msgspec.Struct, frozen=True, tag=True):
    """A command about an adapter is carried out, or ``code`` is that of the error that prevented it."""

    call: int
    code: str | None = None
    message: str = ""


class Died(msgspec.Struct, frozen=True, tag=True):
    """The engine failed and the process ends."""

    message: str


Command = StartEngine | Add | Abort | LoadAdapter | UnloadAdapter
Event = Started | StartFailed | StepOutputs | AdapterSettled | Died


class ProtocolError(EngineError, code="engine_protocol_error"):
    """The other side sent something that is not a frame."""


def encode(message: Command | Event) -> bytes:
    """One frame."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


class FrameReader:
    """Cuts a byte stream into messages of one direction. Raises ProtocolError for what is not one."""

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
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes is above the limit of {MAX_FRAME_BYTES}")
            if len(self._buffer) < body + length:
                break
            start = body + length
            try:
                message = self._decoder.decode(self._buffer[body:start])
            except msgspec.MsgspecError as error:
                raise ProtocolError(f"a frame is not readable: {error}") from error
            yield message
        del self._buffer[:start]
