"""Metrics of the response cache and of the fallback legs."""

from __future__ import annotations

from observability.collectors import leg_families, response_cache_families
from observability.metrics import Metrics
from observability.scrape import ScrapeCollector
from observability.subscribers import EventDispatcher
from resilience.leg_limits import LegFigures, LegSkipped
from resilience.response_cache_values import (
    AnswersLost,
    CacheFigures,
    LookedUp,
    Lookup,
    StoreBroke,
    StoreIsBack,
)
from tests.observability.test_subscribers import Lines


def test_every_event_of_the_cache_and_the_legs_is_counted() -> None:
    metrics = Metrics(version="1", known_backends=["bedrock"])
    log = Lines()
    hub = EventDispatcher().record(metrics, log=log, clock=lambda: 0.0)
    for kind in Lookup:
        hub.emit(LookedUp(kind))
    hub.emit(AnswersLost(3, "store"))
    hub.emit(AnswersLost(1, "defect", "KeyError"))
    hub.emit(LegSkipped("bedrock", "spend"))
    hub.emit(StoreBroke("ConnectionError"))
    hub.emit(StoreIsBack())
    metrics.registry.register(ScrapeCollector(response_cache_families, lambda: CacheFigures(2, 4096)))
    legs = {"bedrock": LegFigures(1, 500_000_000, 250_000_000)}
    metrics.registry.register(ScrapeCollector(leg_families, lambda: legs))
    text = metrics.render().decode()
    for line in (
        'sluice_response_cache_lookups_total{kind="exact"} 1.0',
        'sluice_response_cache_lookups_total{kind="miss"} 1.0',
        'sluice_response_cache_lookups_total{kind="error"} 1.0',
        'sluice_response_cache_lost_total{reason="store"} 3.0',
        'sluice_fallback_leg_skipped_total{leg="bedrock",reason="spend"} 1.0',
        "sluice_response_cache_entries 2.0",
        "sluice_response_cache_bytes 4096.0",
        'sluice_fallback_leg_in_use{leg="bedrock"} 1.0',
        'sluice_fallback_leg_spend_usd{leg="bedrock"} 0.75',
    ):
        assert line in text, line
    assert "response cache not reached" in str(vars(log)) and "reached again" in str(vars(log))


def test_without_a_cache_here_nothing_is_shown_of_it() -> None:
    text = Metrics(version="1").render().decode()
    assert "sluice_response_cache_entries" not in text
