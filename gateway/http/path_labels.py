"""What the gateway calls a path in traces and logs; a path as it was sent may hold anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from starlette.routing import compile_path

UNKNOWN: Final = "unknown"
# Asked all day by machines; what they see, metrics tell.
MONITORS: Final = frozenset({"/ping", "/ready", "/metrics", "/health/deep"})
CONTRACTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "/v1/generate": "native",
        "/v1/generate/ws": "native",
        "/invocations": "native",
        "/v1/chat/completions": "chat",
        "/v1/completions": "completions",
    }
)


@dataclass(frozen=True, slots=True)
class PathLabel:
    """A path: its name, the contract when it generates, and whether it is a monitor's."""

    name: str
    contract: str | None = None
    monitor: bool = False


_UNKNOWN: Final = PathLabel(UNKNOWN)


class PathLabels:
    """Every path that is served.

    Args:
        paths: as the routes have them, variable parts in braces.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        places = {path: PathLabel(path, CONTRACTS.get(path), path in MONITORS) for path in paths}
        self._places = places
        self._patterns = tuple(
            (compile_path(path)[0], places[path]) for path in sorted(places) if "{" in path
        )

    def of(self, path: str) -> PathLabel:
        """The place of a path as it was sent."""
        place = self._places.get(path)
        if place is not None:
            return place
        for pattern, found in self._patterns:
            if pattern.match(path):
                return found
        return _UNKNOWN
