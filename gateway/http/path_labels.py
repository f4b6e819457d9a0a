"""Labels of paths in traces and logs, in place of the sent path, which may contain anything."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

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
