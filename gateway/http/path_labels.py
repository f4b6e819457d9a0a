"""Labels of paths in traces and logs, in place of the sent path, which may contain anything."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from starlette.routing import compile_path

UNKNOWN: Final = "unknown"
# Requests to these are not reported: machines poll them continuously.
MONITORS: Final = frozenset({"/ping", "/health", "/ready", "/metrics", "/health/deep"})
# The contract of each path whose requests are counted.
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
        "/v1/embeddings": "embeddings",
        "/v1/rerank": "rerank",
        "/v2/rerank": "rerank",
        "/v1/score": "rerank",
        "/v1/audio/transcriptions": "audio",
        "/v1/audio/translations": "audio",
    }
)


class PathLabels:
    """The labels of all served paths.

    ``paths``: the routes' paths, with variable parts in braces.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = frozenset(paths)
        self._patterns = [(compile_path(path)[0], path) for path in sorted(self._paths) if "{" in path]

    def of(self, path: str) -> str:
        """The label of a path as it was sent."""
        if path in self._paths:
            return path
        return next((label for pattern, label in self._patterns if pattern.match(path)), UNKNOWN)
