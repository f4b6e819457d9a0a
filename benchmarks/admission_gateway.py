"""`sluice serve` as the live admission benchmark runs it: keys for several tenants, admission on or off.

    python -m benchmarks.admission_gateway [--open] CONFIG

Keys ``tenant-N`` belong to tenant ``tN``, so that the fairness of a queue can be measured. With ``--open``
admission gets no load figures of the engine and has no limits, so that all requests reach the engine's queue.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from msgspec.structs import replace

from accounting.keys import HIGHEST_PRIORITY, CallerRole, KeyRecord, KeyRing
from admission.controller import AdmissionController
from admission.queue import Slot
from admission.values import AdmissionLimits, BackendLoad, Demand
from gateway.wiring import access, control
from ops.cli.main import app

TENANT_KEY = "tenant-"
# Limits that no benchmark reaches.
UNBOUNDED = AdmissionLimits(
    max_queue=1_000_000,
    max_queue_tokens=1 << 50,
    max_queue_bytes=1 << 50,
    max_wait_s=1e6,
    max_in_flight=1_000_000,
    max_prefill_tokens=1 << 50,
    rungs=(),
)


class Tenants(KeyRing):
    """A key ring that knows the benchmark's tenants."""

    def lookup(self, bearer: str | None) -> KeyRecord | None:
        """The record of ``tenant-N``, or of the key that was configured."""
        if bearer is not None and bearer.startswith(TENANT_KEY):
            name = "t" + bearer.removeprefix(TENANT_KEY)
            return KeyRecord(name, CallerRole.CALLER, bearer, HIGHEST_PRIORITY)
        return super().lookup(bearer)


class Open(AdmissionController):
    """Admission that never holds a request."""

    def __init__(
        self, limits: AdmissionLimits, *, load: Callable[[str], BackendLoad | None], **others: Any
    ) -> None:
        super().__init__(UNBOUNDED, load=lambda backend: None, **others)

    def admit(self, demand: Demand) -> AbstractAsyncContextManager[Slot]:
        """A slot, whatever the route's limits are."""
        return super().admit(replace(demand, limits=UNBOUNDED))


def main(arguments: list[str]) -> None:
    """Start the gateway."""
    vars(access)["KeyRing"] = Tenants
    if arguments[0] == "--open":
        arguments = arguments[1:]
        vars(control)["AdmissionController"] = Open
    app(["serve", "--config", arguments[0]])


if __name__ == "__main__":
    main(sys.argv[1:])
