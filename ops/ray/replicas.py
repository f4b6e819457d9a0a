"""Calls the engine replicas through Serve's deployment handle."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import msgspec
from ray.exceptions import RayError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    RequestCancelledError,
)
from ray.serve.handle import DeploymentHandle

from ops.ray.port import ReplicaLost, ReplicasFull
from ops.ray.wire import ReplicaPiece, ReplicaSignals, RouterHint, decode_piece, decode_signals, encode

# Errors that mean a lost replica, connection, or state of Serve. A replica sends its own failures as pieces.
_LOST = (
    DeploymentUnavailableError,
    RayError,
    RayServeException,
    RequestCancelledError,
    grpc.aio.AioRpcError,
    ConnectionError,
    msgspec.DecodeError,
)


class ServeReplicas:
    """Calls the engine deployment by its handle.

    Calls use gRPC directly to the replica's process, not Ray's object store: measured on this path, a
    streamed piece costs 0.11 ms instead of 0.31 ms (docs/ray.md).
    """

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        direct: dict[str, Any] = {
            "_by_reference": False,
            "request_serialization": "pickle",
            "response_serialization": "pickle",
        }
        self._streaming = handle.options(method_name="generate", stream=True, **direct)
        self._plain = handle.options(**direct)

    @asynccontextmanager
    async def call(self, route: RouterHint, work: bytes) -> AsyncIterator[AsyncIterator[ReplicaPiece]]:
        response: Any = self._streaming.remote(encode(route), work)
        try:
            yield _pieces(response)
        finally:
            # Has no effect on a complete answer.
            response.cancel()

    async def signals(self, reporter_name: str, queued: int, timeout_s: float) -> Sequence[ReplicaSignals]:
        try:
            async with asyncio.timeout(timeout_s):
                # Serve's public method waits for all results, so one hanging replica would delay all others.
                response: Any = self._plain.broadcast("signals", reporter_name, queued)
                answers = await response._fetch_replica_results_async()
        except DeploymentUnavailableError:
            return []  # no replica is there
        except (*_LOST, TimeoutError) as error:
            raise ReplicaLost(type(error).__name__) from error
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(_figures(answer, timeout_s)) for answer in answers]
        found = [one.result() for one in asked]
        reported = [one for one in found if isinstance(one, ReplicaSignals)]
        # The ready ones may be among the late: a replica that has just started answers first.
        silent = any(isinstance(one, (TimeoutError, msgspec.DecodeError)) for one in found)
        if silent and not any(one.ready for one in reported):
            raise ReplicaLost("no ready replica reported readable figures in time")
        return reported


async def _figures(answer: Any, timeout_s: float) -> ReplicaSignals | Exception:
    """One replica's figures, or why there are none; those of another version may not be readable."""
    try:
        async with asyncio.timeout(timeout_s):
            return decode_signals(await answer.get_async())
    except (TimeoutError, *_LOST) as error:
        answer.cancel()
        return error


async def _pieces(response: AsyncIterator[bytes]) -> AsyncIterator[ReplicaPiece]:
    try:
        async for data in response:
            yield decode_piece(data)
    except BackPressureError as error:
        raise ReplicasFull("every engine replica is full") from error
    except _LOST as error:
        raise ReplicaLost(type(error).__name__) from error
