"""Engine replicas in this process, called through the backend's port: everything but Ray itself."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from gateway.backends.embedded import EmbeddedBackend
from gateway.backends.port import Completion
from gateway.config.ray import RaySection
from gateway.contracts.events import Delta
from gateway.contracts.features import KNOWN_FEATURES
from gateway.contracts.values import FinishReason, Usage
from ops.ray.backend import RayBackend
from ops.ray.port import ClusterPlace, EngineReplicas
from ops.ray.replica import EngineReplica, configured_engine
from ops.ray.wire import ReplicaPiece, ReplicaSignals, RouterHint, decode_piece, decode_signals, encode
from tests.conformance.harness import BLOCK_SIZE, DEMO_MODEL, MAX_MODEL_LEN, Specimen, make_adapters

RULES = RaySection(signals_seconds=0.05, first_token_timeout_seconds=30.0, affinity_block_tokens=16)
MAX_RUNNING = 128


def make_backend(
    replicas: EngineReplicas,
    *,
    rules: RaySection = RULES,
    queued: Callable[[], int] = lambda: 0,
    clock: Callable[[], float] = time.monotonic,
    lengths: list[int] | None = None,
) -> RayBackend:
    """Return a Ray backend over these replicas."""
    return RayBackend(
        "local",
        kind="embedded",
        model="demo",
        replicas=replicas,
        features=KNOWN_FEATURES,
        continues=EmbeddedBackend.continues,
        section=rules,
        max_running=MAX_RUNNING,
        reporter_name="gateway-1",
        queued=queued,
        on_max_model_len=(lengths if lengths is not None else []).append,
        clock=clock,
    )


@dataclass
class ScriptedCall:
    """The script of one call: the pieces that it gives, then perhaps an error, or silence.

    Args:
        pieces: given in order.
        then: raised after them.
        hangs: whether the call hangs after them.
    """

    pieces: Sequence[ReplicaPiece] = ()
    then: Exception | None = None
    hangs: bool = False


WHOLE = ScriptedCall(
    [
        ReplicaPiece(replica="a"),
        ReplicaPiece(deltas=(Delta("Hello", 1, token_ids=(5,)), Delta(" you", 1, token_ids=(6,)))),
        ReplicaPiece(completion=Completion(FinishReason.STOP, Usage(3, 2))),
    ]
)


class FakeReplicas:
    """Fake replicas: each call plays the next script; ``figures`` are their signals."""

    def __init__(self, *plays: ScriptedCall) -> None:
        self._calls = list(plays)
        self.routes: list[RouterHint] = []
        self.open = 0
        self.called = asyncio.Event()
        self.reports: list[tuple[str, int]] = []
        self.figures: Sequence[ReplicaSignals] | Exception = (ReplicaSignals("a"), ReplicaSignals("b"))

    @asynccontextmanager
    async def call(self, route: RouterHint, work: bytes) -> AsyncIterator[AsyncIterator[ReplicaPiece]]:
        self.routes.append(route)
        self.open += 1
        self.called.set()
        try:
            yield self._run(self._calls.pop(0))
        finally:
            self.open -= 1

    async def _run(self, call: ScriptedCall) -> AsyncIterator[ReplicaPiece]:
        for piece in call.pieces:
            yield piece
        if call.hangs:
            await asyncio.Event().wait()
        if call.then is not None:
            raise call.then

    async def signals(self, reporter_name: str, queued: int, timeout_s: float) -> Sequence[ReplicaSignals]:
        self.reports.append((reporter_name, queued))
        if isinstance(self.figures, Exception):
            raise self.figures
        return self.figures


class InProcess:
    """Calls one real engine replica without Serve."""

    def __init__(self, replica: EngineReplica) -> None:
        self._replica = replica

    @asynccontextmanager
    async def call(self, route: RouterHint, work: bytes) -> AsyncIterator[AsyncIterator[ReplicaPiece]]:
        async with aclosing(self._replica.generate(encode(route), work)) as data:  # type: ignore[type-var]
            yield (decode_piece(one) async for one in data)

    async def signals(self, reporter_name: str, queued: int, timeout_s: float) -> Sequence[ReplicaSignals]:
        return [decode_signals(await self._replica.signals(reporter_name, queued))]


@asynccontextmanager
async def ray_replica(folder: Path) -> AsyncIterator[Specimen]:
    """Run the embedded engine in an engine replica, called as an ingress replica calls it."""
    config = folder / "replica.yaml"
    engine = {
        "model": str(DEMO_MODEL),
        "max_model_len": MAX_MODEL_LEN,
        "block_size": BLOCK_SIZE,
        "num_blocks": 512,
        "num_threads": 1,
        "max_loras": 2,
        "seed": 0,
    }
    config.write_text(yaml.safe_dump({"engine": engine}))
    replica = EngineReplica(ClusterPlace(str(config), os.getcwd(), "sluice"), configured_engine, "one")
    await replica.start()
    backend = make_backend(InProcess(replica))
    try:
        await backend.ask()

        async def idle() -> bool:
            await backend.ask()
            load = backend.load
            return load is not None and not (load.running or load.waiting or load.kv_usage)

        yield Specimen(backend, idle, make_adapters(folder))
    finally:
        await replica.stop()
