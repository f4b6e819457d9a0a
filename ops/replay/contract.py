"""The two contracts of the load generator: the request, and how an event of the answer is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol


class ContractName(StrEnum):
    """Values of ``--contract``."""

    NATIVE = "native"
    OPENAI = "openai"


@dataclass(slots=True)
class StreamReading:
    """What was read of a stream so far."""

    texts: int = 0
    ended: bool = False
    code: str | None = None
    finish_reason: str | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    fallback: str | None = None
    backend: str | None = None

    def extras(self, found: Mapping[str, Any]) -> None:
        """Take the backend and the fallback from a native answer or from OpenAI's ``sluice`` object."""
        self.backend = found.get("backend") or self.backend
        fallback = found.get("fallback")
        if isinstance(fallback, Mapping):
            self.fallback = f"{fallback.get('kind')}:{fallback.get('reason')}"
        self.finish_reason = found.get("finish_reason") or self.finish_reason


class ReplayContract(Protocol):
    """A way to ask for one streamed answer."""

    path: str

    def body(self, text: str, max_tokens: int) -> dict[str, object]:
        """The JSON to post."""

    def read(self, event: Mapping[str, Any], reading: StreamReading) -> None:
        """Take one event's object into ``reading``; ``texts`` grows by one for a piece of text."""

    def done(self, reading: StreamReading) -> None:
        """The stream said ``[DONE]``."""


class Native:
    """``POST /v1/generate``."""

    path = "/v1/generate"

    def __init__(self, route: str | None = None) -> None:
        self._route = {} if route is None else {"route": route}

    def body(self, text: str, max_tokens: int) -> dict[str, object]:
        """One user turn."""
        return {
            **self._route,
            "messages": [{"role": "user", "content": text}],
            "sampling": {"max_tokens": max_tokens},
            "stream": True,
        }

    def read(self, event: Mapping[str, Any], reading: StreamReading) -> None:
        """``token``, ``done`` or ``error``."""
        match event.get("type"):
            case "token":
                reading.texts += bool(event.get("delta"))
            case "done":
                usage = _mapping(event.get("usage"))
                reading.input_tokens = _count(usage.get("input_tokens"))
                reading.output_tokens = _count(usage.get("output_tokens"))
                reading.cached_tokens = _count(usage.get("cached_tokens"))
                reading.extras(event)
                reading.ended = True
            case "error":
                reading.code = error_code(event) or "error"
                reading.ended = True

    def done(self, reading: StreamReading) -> None:
        """Not part of this contract, whose ``done`` event ends the stream."""
        reading.ended = True


class OpenAI:
    """``POST /v1/chat/completions``."""

    path = "/v1/chat/completions"

    def __init__(self, model: str, route: str | None = None) -> None:
        self._fixed: dict[str, object] = {"model": model}
        if route is not None:
            self._fixed["sluice"] = {"route": route}

    def body(self, text: str, max_tokens: int) -> dict[str, object]:
        """One user turn, usage asked for."""
        return {
            **self._fixed,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def read(self, event: Mapping[str, Any], reading: StreamReading) -> None:
        """A ``chat.completion.chunk``, or an error."""
        if "error" in event:
            reading.code = error_code(event) or "error"
            return
        for choice in event.get("choices") or ():
            reading.texts += bool(_mapping(_mapping(choice).get("delta")).get("content"))
            reading.finish_reason = _mapping(choice).get("finish_reason") or reading.finish_reason
        if isinstance(usage := event.get("usage"), Mapping):
            reading.input_tokens = _count(usage.get("prompt_tokens"))
            reading.output_tokens = _count(usage.get("completion_tokens"))
            details = _mapping(usage.get("prompt_tokens_details"))
            reading.cached_tokens = _count(details.get("cached_tokens"))
        if isinstance(extras := event.get("sluice"), Mapping):
            reading.extras(extras)

    def done(self, reading: StreamReading) -> None:
        """``[DONE]`` ends it."""
        reading.ended = True


def error_code(body: object) -> str | None:
    """The stable code of an error object of either contract, if there is one."""
    error = _mapping(_mapping(body).get("error"))
    code = error.get("sluice_code") or error.get("code")
    return code if isinstance(code, str) and code else None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
