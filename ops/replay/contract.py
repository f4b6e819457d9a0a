"""The two API contracts of the load generator, each for streamed answers.

``body`` is the JSON to post to ``path``. ``read`` updates an outcome from one event; its ``texts`` grows by
one for a piece of text or reasoning.
"""

from collections.abc import Mapping
from typing import Any

from ops.replay.outcome import ReplayedRequest
from ops.session import error_code, mapping_of


class Native:
    """``POST /v1/generate``."""

    path = "/v1/generate"

    def __init__(self, route: str | None = None) -> None:
        self._route = {} if route is None else {"route": route}

    def body(self, text: str, max_tokens: int) -> dict[str, object]:
        return {
            **self._route,
            "messages": [{"role": "user", "content": text}],
            "sampling": {"max_tokens": max_tokens},
            "stream": True,
        }

    def read(self, event: Mapping[str, Any], reading: ReplayedRequest) -> None:
        match event.get("type"):
            case "token" | "reasoning":
                reading.texts += bool(event.get("delta"))
            case "done":
                usage = mapping_of(event.get("usage"))
                reading.input_tokens = _count(usage.get("input_tokens"))
                reading.output_tokens = _count(usage.get("output_tokens"))
                reading.cached_tokens = _count(usage.get("cached_tokens"))
                _take_extras(event, reading)
                reading.ended = True
            case "error":
                reading.code = error_code(event) or "error"
                reading.ended = True


class OpenAI:
    """``POST /v1/chat/completions``."""

    path = "/v1/chat/completions"

    def __init__(self, model: str, route: str | None = None) -> None:
        self._fixed: dict[str, object] = {"model": model}
        if route is not None:
            self._fixed["sluice"] = {"route": route}

    def body(self, text: str, max_tokens: int) -> dict[str, object]:
        return {
            **self._fixed,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def read(self, event: Mapping[str, Any], reading: ReplayedRequest) -> None:
        if "error" in event:
            reading.code = error_code(event) or "error"
            return
        for choice in event.get("choices") or ():
            delta = mapping_of(mapping_of(choice).get("delta"))
            reading.texts += any(map(delta.get, ("content", "reasoning", "reasoning_content")))
            reading.finish_reason = mapping_of(choice).get("finish_reason") or reading.finish_reason
        if isinstance(usage := event.get("usage"), Mapping):
            reading.input_tokens = _count(usage.get("prompt_tokens"))
            reading.output_tokens = _count(usage.get("completion_tokens"))
            details = mapping_of(usage.get("prompt_tokens_details"))
            reading.cached_tokens = _count(details.get("cached_tokens"))
        if isinstance(extras := event.get("sluice"), Mapping):
            _take_extras(extras, reading)


ReplayContract = Native | OpenAI


def _take_extras(found: Mapping[str, Any], reading: ReplayedRequest) -> None:
    """Read backend, fallback and finish reason from a native answer or OpenAI's ``sluice`` object."""
    reading.backend = found.get("backend") or reading.backend
    fallback = found.get("fallback")
    if isinstance(fallback, Mapping):
        reading.fallback = f"{fallback.get('kind')}:{fallback.get('reason')}"
    reading.finish_reason = found.get("finish_reason") or reading.finish_reason


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
