"""Live metrics of used tokens and cost; the ledger has the exact sums."""

from collections import defaultdict
from collections.abc import Iterable
from operator import add, attrgetter

from prometheus_client import CollectorRegistry

from observability.events import DISCONNECTED, RequestRecord
from observability.histogram import LabelCounter
from observability.labels import Bounded, counted

KINDS = ("input", "output", "cached")
OUTCOMES = ("answered", "fallback", "refused", "failed", "left")
_NANO = 1e-9
# Equal in requests that count for the same series.
_series_of = attrgetter(
    "tenant", "adapter_id", "route", "backend_name", "status", "error_code", "fallback_kind"
)
_tokens_of = attrgetter("input_tokens", "output_tokens", "cached_tokens")


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
        groups: defaultdict[object, list[RequestRecord]] = defaultdict(list)
        for record in records:
            groups[_series_of(record)].append(record)
        for group in groups.values():
            one = group[0]
            self._requests.of(one.tenant)[outcome(one)] += len(group)
            costs = [record.cost_nanousd for record in group if record.cost_nanousd is not None]
            if costs:
                cost_usd = sum(costs) * _NANO
                self._cost(one.route, one.backend_name).inc(cost_usd)
                self._tenant_cost(one.tenant).inc(cost_usd)
            tokens = [sum(kind) for kind in zip(*map(_tokens_of, group), strict=True)]
            if any(tokens):
                for row in (self._by_tenant.of(one.tenant), self._by_adapter.of(one.adapter_id)):
                    row[:] = map(add, row, tokens)
