"""Reads samples from a page in Prometheus' text format."""

import re
from collections.abc import Iterator
from typing import Final

from prometheus_client.samples import Sample

# One label, and one line: name, labels, value; a timestamp or a comment may follow. ``prometheus_client`` has
# a parser of whole pages, which takes five times as long for a line.
_LABEL: Final = re.compile(r'\s*+([a-zA-Z_]\w*+)\s*+=\s*+"((?:[^"\\]|\\.)*+)"\s*+(?:,|$)', re.ASCII)
_LINE: Final = re.compile(
    r'([a-zA-Z_:][\w:]*+)\s*+(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*+")*+)\}\s*+)?(\S+)', re.ASCII
)
_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)


def samples_of(text: str, *names: str) -> Iterator[Sample]:
    """The samples of these names, in order; malformed lines are skipped.

    Only lines with these names are parsed.
    """
    for line in text.split("\n"):
        if not line.startswith(names):
            continue
        found = _LINE.match(line)
        if found is None or found[1] not in names:
            continue
        try:
            yield Sample(found[1], _labels(found[2] or ""), float(found[3]))
        except ValueError:
            continue


def _labels(text: str) -> dict[str, str]:
    """The labels between the braces. Raises ValueError."""
    labels, at = dict[str, str](), 0
    while at < len(text.rstrip()):
        label = _LABEL.match(text, at)
        if label is None:
            raise ValueError("malformed labels")
        labels[label[1]] = _ESCAPED.sub(_unescaped, label[2]) if "\\" in label[2] else label[2]
        at = label.end()
    return labels


def _unescaped(escape: re.Match[str]) -> str:
    return {"n": "\n", "\\": "\\", '"': '"'}.get(escape[1], escape[0])


def total_of(text: str, name: str) -> float:
    """The sum of a metric over its labels; 0 when the page does not have it."""
    return sum(sample.value for sample in samples_of(text, name))
