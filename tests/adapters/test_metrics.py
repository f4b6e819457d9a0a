"""Metrics of the events of adapters."""

from __future__ import annotations

from adapters.events import (
    AdapterAsked,
    AdapterLoaded,
    AdapterLoadFailed,
    AdapterReplacedByBase,
    AdapterUnloaded,
)
from observability.collectors import plain
from observability.metrics import Metrics
from observability.subscribers import EventDispatcher


def test_each_event_is_counted_and_the_gauges_are_read_at_the_scrape() -> None:
    metrics = Metrics(version="0")
    metrics.registry.register(plain("sluice_adapters", lambda: {"active": 2, "staged": 1}))
    metrics.read(sluice_adapters_resident=lambda: 3, sluice_adapter_places=lambda: 8)
    hub = EventDispatcher().record(metrics)
    for event in (
        AdapterAsked("a", resident=False),
        AdapterLoaded("a", 0.02),
        AdapterLoaded("b", 0.02, ahead=True),
        AdapterLoadFailed("c", "adapter_not_found", "no folder", 1.0),
        AdapterUnloaded("b", "room"),
        AdapterReplacedByBase("c"),
    ):
        hub.emit(event)
    shown = metrics.render().decode()
    for line in (
        'sluice_adapter_requests_total{adapter="a",resident="no"} 1.0',
        'sluice_adapter_loads_total{result="on_request"} 1.0',
        'sluice_adapter_loads_total{result="ahead"} 1.0',
        'sluice_adapter_loads_total{result="adapter_not_found"} 1.0',
        "sluice_adapter_load_seconds_count 2.0",
        'sluice_adapter_unloads_total{reason="room"} 1.0',
        'sluice_adapter_replaced_by_base_total{adapter="c"} 1.0',
        'sluice_adapters{state="active"} 2.0',
        "sluice_adapters_resident 3.0",
        "sluice_adapter_places 8.0",
    ):
        assert line in shown
    assert "sluice_telemetry_errors_total{" not in shown


def test_many_names_become_few_series() -> None:
    metrics = Metrics(version="0")
    hub = EventDispatcher().record(metrics)
    for number in range(1_000):
        hub.emit(AdapterAsked(f"a{number}", resident=True))
    shown = metrics.render().decode()
    assert shown.count("sluice_adapter_requests_total{") <= 101
    assert 'adapter="other"' in shown
