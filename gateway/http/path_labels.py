"""Labels of paths in traces and logs, in place of the sent path, which may contain anything."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from starlette.routing import compile_path

UNKNOWN: Final = "unknown"
# Requests to these are not reported: machines poll them continuously.
MONITORS: Final = frozenset({"/ping", "/health", "/ready", "/metrics", "/health/deep"})
CONTRACTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "/v1/generate": "native",
        "/v1/generate/ws": "native",
        "/invocations": "native",
        "/v1/chat/completions": "chat",
        "/v1/completions": "completions",
        "/v1/messages": "messages",
        "/v1/responses": "responses",
        "/v1/responses/compact": "responses",
    }
)


@dataclass(frozen=True, slots=True)
class PathLabel:
    """A served path: its name, its contract if it generates, and whether monitors read it."""

    name: str
    contract: str | None = None
    monitor: bool = False


_UNKNOWN: Final = PathLabel(UNKNOWN)


class PathLabels:
    """The labels of all served paths.

    ``paths``: the routes' paths, with variable parts in braces.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        labels = {path: PathLabel(path, CONTRACTS.get(path), path in MONITORS) for path in paths}
        self._labels = labels
        self._patterns = tuple(
            (compile_path(path)[0], labels[path]) for path in sorted(labels) if "{" in path
        )

    def of(self, path: str) -> PathLabel:
        """The label of a path as it was sent."""
        label = self._labels.get(path)
        if label is not None:
            return label
        for pattern, found in self._patterns:
            if pattern.match(path):
                return found
        return _UNKNOWN
