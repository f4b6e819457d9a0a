"""Messages between ingress and engine replicas, as MessagePack: no pickle that depends on a version.

A call has a :class:`RouterHint` for the router, and the work, which the router does not read. An answer is a
stream of :class:`ReplicaPiece`; the first one names the replica.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from admission.values import BackendLoad
from budgeting.token_ids import PieceIds
from gateway.backends.port import Completion, Work
from gateway.backends.workers.worker_choice import WorkerPreference
from gateway.contracts.events import AnswerEvent
from gateway.contracts.features import KNOWN_FEATURES, Feature
from resilience.failures import BackendFailure, FailureKind


class Failed(msgspec.Struct, frozen=True, array_like=True):
    """A :class:`BackendFailure` as a message."""

    kind: FailureKind
    message: str
    retry_after_s: float | None = None
    param: str | None = None
    final: bool = False

    @classmethod
    def of(cls, failure: BackendFailure) -> Failed:
        return cls(failure.kind, str(failure), failure.retry_after_s, failure.param, failure.no_retry_here)

    def failure(self) -> BackendFailure:
        return BackendFailure(
            self.kind,
            self.message,
            retry_after_s=self.retry_after_s,
            param=self.param,
            no_retry_here=self.final,
        )


class ReplicaPiece(msgspec.Struct, frozen=True, array_like=True):
    """One message of a replica: its name, pieces of the answer, or the answer's end."""

    replica: str = ""
    deltas: tuple[AnswerEvent, ...] = ()
    completion: Completion | None = None
    failed: Failed | None = None


class ReplicaSignals(msgspec.Struct, frozen=True):
    """A replica's figures; ``max_model_len`` is in tokens, ``features`` are those of its engine and model."""

    replica: str
    ready: bool = True
    load: BackendLoad = BackendLoad()
    max_model_len: int = 0
    features: frozenset[Feature] = KNOWN_FEATURES


class RouterHint(msgspec.Struct, frozen=True, array_like=True):
    """The part of a call that the router reads.

    ``chain``: the prompt's prefix hashes, one number per block; the first ``stable_blocks`` are the stable
    prefix. ``avoid``: replicas that failed this request, or that do not report figures.
    """

    chain: tuple[int, ...] = ()
    stable_blocks: int = 0
    adapter: str | None = None
    avoid: tuple[str, ...] = ()

    @property
    def preference(self) -> WorkerPreference:
        """The hint in the form that :class:`WorkerChoice` takes."""
        return WorkerPreference(self.chain, self.stable_blocks, self.adapter)


def _plain(value: object) -> object:
    """Convert read-only mappings to dicts, and join token ids that are in pieces."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, PieceIds):
        return value.joined
    raise TypeError(f"{type(value).__name__} cannot be sent to a replica")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
# Each raises msgspec.DecodeError.
decode_work = msgspec.msgpack.Decoder(Work).decode
decode_piece = msgspec.msgpack.Decoder(ReplicaPiece).decode
decode_signals = msgspec.msgpack.Decoder(ReplicaSignals).decode
_hint = msgspec.msgpack.Decoder(RouterHint)


def decode_hint(data: bytes) -> RouterHint:
    """Decode a hint. A function: Serve pickles the router's globals, and a decoder cannot be pickled."""
    return _hint.decode(data)


def encode(value: Work | ReplicaPiece | ReplicaSignals | RouterHint) -> bytes:
    return _encoder.encode(value)
