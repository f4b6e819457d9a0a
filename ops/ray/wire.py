"""What travels between ingress and engine replicas, as MessagePack: no pickle that depends on a version.

A call is a :class:`RouterHint` for the router, next to the work, which the router does not read. An answer is
a stream of :class:`ReplicaPiece`; the first one names the replica.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from gateway.backends.port import Completion, Delta, Work
from gateway.backends.workers.worker_choice import Wish
from resilience.failures import BackendFailure, FailureKind


class Failed(msgspec.Struct, frozen=True, array_like=True):
    """A :class:`BackendFailure` on its way."""

    kind: FailureKind
    message: str
    retry_after_s: float | None = None
    param: str | None = None
    final: bool = False

    @classmethod
    def of(cls, failure: BackendFailure) -> Failed:
        """The failure's fields."""
        return cls(failure.kind, str(failure), failure.retry_after_s, failure.param, failure.final)

    def failure(self) -> BackendFailure:
        """The failure, again."""
        return BackendFailure(
            self.kind, self.message, retry_after_s=self.retry_after_s, param=self.param, final=self.final
        )


class ReplicaPiece(msgspec.Struct, frozen=True, array_like=True):
    """What a replica sends at once: who it is, pieces of the answer, or how it ended."""

    replica: str = ""
    deltas: tuple[Delta, ...] = ()
    completion: Completion | None = None
    failed: Failed | None = None


class ReplicaSignals(msgspec.Struct, frozen=True):
    """A replica's own figures.

    Args:
        replica: its id.
        ready: whether its engine takes work.
        running: sequences in the batch.
        waiting: sequences in the engine's queue.
        kv_usage: share of KV blocks in use, 0 to 1.
        total_blocks: KV blocks of its pool.
        block_size: tokens a block holds.
        max_model_len: longest sequence that its engine really takes, in tokens.
    """

    replica: str
    ready: bool = True
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    total_blocks: int = 0
    block_size: int = 0
    max_model_len: int = 0


class RouterHint(msgspec.Struct, frozen=True, array_like=True):
    """What the router wants to know of a call.

    Args:
        chain: fingerprint of the prompt, a number a block.
        stable_blocks: how many of them are the stable prefix.
        adapter: the id of its adapter.
        avoid: replicas that failed this request before.
    """

    chain: tuple[int, ...] = ()
    stable_blocks: int = 0
    adapter: str | None = None
    avoid: tuple[str, ...] = ()

    @property
    def wish(self) -> Wish:
        """The same, as a choice takes it."""
        return Wish(self.chain, self.stable_blocks, self.adapter)


def _plain(value: object) -> object:
    """Read-only mappings are sent as mappings."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be sent to a replica")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_work = msgspec.msgpack.Decoder(Work)
_piece = msgspec.msgpack.Decoder(ReplicaPiece)
_signals = msgspec.msgpack.Decoder(ReplicaSignals)
_route = msgspec.msgpack.Decoder(RouterHint)


def encode(value: Work | ReplicaPiece | ReplicaSignals | RouterHint) -> bytes:
    """The bytes of one of these."""
    return _encoder.encode(value)


def decode_work(data: bytes) -> Work:
    """The work. Raises msgspec.DecodeError."""
    return _work.decode(data)


def decode_piece(data: bytes) -> ReplicaPiece:
    """The piece. Raises msgspec.DecodeError."""
    return _piece.decode(data)


def decode_signals(reported: Sequence[bytes]) -> list[ReplicaSignals]:
    """The figures of several replicas. Raises msgspec.DecodeError."""
    return [_signals.decode(one) for one in reported]


def decode_route(data: bytes) -> RouterHint:
    """What the router wants to know. Raises msgspec.DecodeError."""
    return _route.decode(data)
