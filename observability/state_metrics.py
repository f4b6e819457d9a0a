"""The state store in the metrics, read when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """A stream that this process follows.

    Args:
        number: the last record in force.
        standing: ``following``, ``away``, ``lost`` or ``refused``.
    """

    number: int
    standing: str


class StateCollector(Collector):
    """Whether the state store is reached, and how far this process follows each stream.

    Args:
        read: the state now; must neither block nor raise. The streams are the code's own, so few.
    """

    def __init__(self, read: Callable[[], tuple[bool, Mapping[str, StreamStatus]]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """The families of one scrape."""
        up, streams = self._read()
        yield GaugeMetricFamily(
            "sluice_state_store_up", "1 while the state store is reached.", value=float(up)
        )
        number = GaugeMetricFamily(
            "sluice_state_stream_number", "Last record in force in this process.", labels=["stream"]
        )
        in_step = GaugeMetricFamily(
            "sluice_state_stream_in_step",
            "0 when the store lost records that are in force here, holds one that cannot be applied, or was "
            "never reached.",
            labels=["stream"],
        )
        for name, one in streams.items():
            number.add_metric([name], one.number)
            in_step.add_metric([name], float(one.standing == "following"))
        yield number
        yield in_step
