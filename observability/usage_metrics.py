"""Live metrics of used tokens and cost; the ledger has the exact sums."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry

from observability.events import DISCONNECTED, RequestRecord
from observability.histogram import LabelCounter
from observability.labels import Bounded, counted

KINDS = ("input", "output", "cached")
OUTCOMES = ("answered", "fallback", "refused", "failed", "left")
_NANO = 1e-9


def outcome(record: RequestRecord) -> int:
    """A request's outcome, as an index of :data:`OUTCOMES`."""
    if record.failed:
        return 3
    if record.status == DISCONNECTED:
        return 4
    if record.status >= 400:
        return 2
    return 0 if record.fallback_kind is None else 1


class UsageMetrics:
    """Counts the use of finished requests. The first tenants and adapters of a process have series of their
    own; all later ones are ``other`` together.
    """

    def __init__(self, registry: CollectorRegistry, routes: Bounded, backends: Bounded) -> None:
        tenants, adapters = Bounded(), Bounded()
        self._requests = LabelCounter(
            "sluice_tenant_requests", "Requests by tenant and outcome.",
            "tenant", "outcome", OUTCOMES, tenants, registry,
        )  # fmt: skip
        self._by_tenant = LabelCounter(
            "sluice_tenant_tokens", "Tokens of answers by tenant; `input` includes `cached`.",
            "tenant", "kind", KINDS, tenants, registry,
        )  # fmt: skip
        self._by_adapter = LabelCounter(
            "sluice_adapter_tokens", "Tokens of answers by adapter; `none` is the base model.",
            "adapter", "kind", KINDS, adapters, registry,
        )  # fmt: skip

        self._cost = counted(
            registry, "sluice_cost_usd_total", "Cost of requests by the price book, where a price fits.",
            route=routes, backend=backends,
        )  # fmt: skip
        self._tenant_cost = counted(
            registry,
            "sluice_tenant_cost_usd_total",
            "Cost of requests by the price book, by tenant.",
            tenant=tenants,
        )

    def count(self, records: Iterable[RequestRecord]) -> None:
        for record in records:
            self._requests.of(record.tenant)[outcome(record)] += 1
            if record.cost_nanousd is not None:
                cost_usd = record.cost_nanousd * _NANO
                self._cost(record.route, record.backend_name).inc(cost_usd)
                self._tenant_cost(record.tenant).inc(cost_usd)
            read, written, cached = record.input_tokens, record.output_tokens, record.cached_tokens
            if read or written or cached:
                for row in (self._by_tenant.of(record.tenant), self._by_adapter.of(record.adapter_id)):
                    row[0] += read
                    row[1] += written
                    row[2] += cached
