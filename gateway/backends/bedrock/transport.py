"""The thread's side: asks region after region until one answers. Imports boto3, and nothing before a call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.backends.bedrock.answer import events_of_answer, events_of_stream
from gateway.backends.bedrock.call import EventBatches
from gateway.backends.bedrock.errors import failure_of
from gateway.backends.bedrock.regions import Regions
from gateway.backends.bedrock.values import ConverseUsage, Event, TextPiece
from gateway.backends.bedrock.wire import Wire
from resilience.failures import BackendFailure


@dataclass(frozen=True, slots=True)
class Access:
    """How Bedrock is reached.

    Args:
        endpoint_url: a service other than AWS's own; ``{region}`` in it stands for the region.
        profile: of the usual configuration files; ``None``: the usual chain.
        connect_timeout_s: longest time to connect.
        read_timeout_s: longest time without a byte.
        connections: kept open in each region.
        streaming: ConverseStream; else Converse, for accounts that may not stream.
    """

    endpoint_url: str | None
    profile: str | None
    connect_timeout_s: float
    read_timeout_s: float
    connections: int
    streaming: bool


class Transport:
    """Makes calls, each in the thread that asks for it.

    Args:
        access: how Bedrock is reached.
        regions: where, in which order; guarded here, since threads share it.
        clock: seconds, monotonic.
        on_failure: called with each region that failed, on the thread.
    """

    def __init__(
        self,
        access: Access,
        regions: Regions,
        *,
        clock: Callable[[], float],
        on_failure: Callable[[str, BackendFailure], None],
    ) -> None:
        self._access = access
        self._regions = regions
        self._clock = clock
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._clients: dict[str, Any] = {}
        self._current = threading.local()

    def ask(self, request: Mapping[str, Any], call: EventBatches) -> None:
        """Make a call and hand its events to ``call``; raises nothing."""
        failure: BackendFailure | None = None
        try:
            self._current.wire = call.wire
            failure = self._ask(request, call)
        except Exception as error:
            failure = failure_of(error, region="any region", delivered=False)
        finally:
            self._current.wire = None
            call.wire.release()
            call.end(failure)

    def warm(self) -> None:
        """Load boto3 and make the preferred region's client, so that the first request need not wait for it.

        Raises:
            BackendFailure: it cannot be made.
        """
        for region in self._order()[:1]:
            try:
                self._client(region)
            except Exception as error:
                raise failure_of(error, region=region, delivered=False) from error

    def _ask(self, request: Mapping[str, Any], call: EventBatches) -> BackendFailure | None:
        failure: BackendFailure | None = None
        for region in self._order():
            delivered = counted = False
            try:
                for event in self._events(region, request):
                    call.put(event)
                    delivered = delivered or isinstance(event, TextPiece)
                    counted = counted or isinstance(event, ConverseUsage)
            except Exception as error:
                if call.wire.is_cut or counted:  # the caller left, or nothing more will come
                    return None
                failure = failure_of(error, region=region, delivered=delivered)
                self._on_failure(region, failure)
                if not failure.policy.other_backend:
                    return failure
                with self._lock:
                    self._regions.failed(region, self._clock(), failure.retry_after_s)
                if delivered:
                    return failure
            else:
                with self._lock:
                    self._regions.answered(region)
                return None
        return failure

    def _order(self) -> Sequence[str]:
        with self._lock:
            return self._regions.order(self._clock())

    def _events(self, region: str, request: Mapping[str, Any]) -> Iterator[Event]:
        client = self._client(region)
        if not self._access.streaming:
            yield from events_of_answer(client.converse(**request))
            return
        stream = client.converse_stream(**request)["stream"]
        try:
            yield from events_of_stream(stream)
        finally:
            stream.close()

    def _client(self, region: str) -> Any:
        with self._making:
            if region not in self._clients:
                self._clients[region] = self._made(region)
            return self._clients[region]

    def _made(self, region: str) -> Any:
        import boto3
        from botocore.config import Config

        from gateway.backends.bedrock.cutting import make_cuttable

        access = self._access
        client = boto3.session.Session(profile_name=access.profile).client(
            "bedrock-runtime",
            region_name=region,
            endpoint_url=access.endpoint_url and access.endpoint_url.replace("{region}", region),
            config=Config(
                connect_timeout=access.connect_timeout_s,
                read_timeout=access.read_timeout_s,
                max_pool_connections=access.connections,
                # The gateway's own policy decides about retries, under the caller's deadline.
                retries={"mode": "standard", "total_max_attempts": 1},
                tcp_keepalive=True,
            ),
        )
        make_cuttable(client, self._wire)
        return client

    def _wire(self) -> Wire | None:
        wire: Wire | None = getattr(self._current, "wire", None)
        return wire
