"""Gives chunks of other servers the types of OpenAI's contract, where each has one possible meaning.

Used only for chunks that cannot be read as they are, so that all others cost nothing more.
"""

import json
from typing import Any, Final

import orjson

MAX_COUNT: Final = 2**31 - 1
"""Most tokens that a worker may report. A larger or negative count is taken as one that was not reported."""

MAX_HALVES: Final = 256
"""Most halves of surrogate pairs that wait for the other half: one for each text that is open."""

Halves = dict[tuple[str, ...], str]
"""First halves of surrogate pairs, each by the path of the text in its event that it ended."""


def plausible(count: int | None) -> int | None:
    return count if count is not None and 0 <= count <= MAX_COUNT else None


def whole_as_events(body: bytes) -> bytes:
    """The events of an answer that was not streamed, or of an error with status 200.

    Raises as :func:`repaired` does, and ValueError for other content.
    """
    answer = _loaded(body)
    if not isinstance(answer, dict) or not (answer.get("choices") or answer.get("error")):
        raise ValueError("no answer")
    return b"data: %b\n\ndata: [DONE]\n\n" % repaired(body)


def repaired(event: bytes, halves: Halves | None = None) -> bytes:
    """The chunk without nulls, with texts where services send parts or objects.

    Some servers cut their texts between UTF-16 units. With ``halves``, the first half of a surrogate pair at
    the end of a text waits there for the next event; another half without its partner becomes U+FFFD.

    Raises ValueError: not JSON; TypeError and RecursionError: too deep, or a number too large.
    """
    if not event.strip():  # keeps the connection open
        return b"{}"
    chunk = _loaded(event, halves)
    if isinstance(chunk, dict) and isinstance(usage := chunk.get("usage"), dict):
        chunk["usage"] = _counts(usage)
    choices = chunk.get("choices") if isinstance(chunk, dict) else None
    for choice in choices if isinstance(choices, list) else ():
        if not isinstance(choice, dict):
            continue
        if not isinstance(choice.get("logprobs"), dict):  # Together: a number
            choice.pop("logprobs", None)
        if "message" in choice:  # of a whole answer
            choice.setdefault("delta", choice.pop("message"))
        if isinstance(message := choice.get("delta"), dict):
            _repair_message(message)
    return orjson.dumps(_usual(chunk))


def _loaded(text: bytes, halves: Halves | None = None) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:  # it refuses half of a surrogate pair
        return _with_whole_pairs(json.loads(text), (), halves)


def _with_whole_pairs(value: Any, path: tuple[str, ...], halves: Halves | None) -> Any:
    """The value with valid texts; ``path`` has the ``index`` of a list's item, if it has one."""
    if isinstance(value, dict):
        return {_replaced(name): _with_whole_pairs(one, (*path, name), halves) for name, one in value.items()}
    if isinstance(value, list):
        places = [one.get("index", at) if isinstance(one, dict) else at for at, one in enumerate(value)]
        return [
            _with_whole_pairs(one, (*path, str(at)), halves) for at, one in zip(places, value, strict=True)
        ]
    if not isinstance(value, str):
        return value
    if halves is not None:
        value = halves.pop(path, "") + value
        if "\ud800" <= value[-1:] <= "\udbff" and len(halves) < MAX_HALVES:
            value, halves[path] = value[:-1], value[-1]
    return _replaced(value)


def _replaced(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _counts(usage: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _counts(one) if isinstance(one, dict) else one
        for name, one in usage.items()
        if not isinstance(one, int | float) or 0 <= one <= MAX_COUNT
    }


def _usual(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _usual(one) for name, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_usual(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _repair_message(message: dict[str, Any]) -> None:
    content = message.get("content")
    if isinstance(content, list):  # Mistral: parts, those of type thinking with parts of their own
        message["content"] = _text(content)
        thoughts = [one["thinking"] for one in content if isinstance(one, dict) and "thinking" in one]
        message["reasoning_content"] = "".join(map(_text, thoughts))
    if isinstance(message.get("reasoning"), dict):
        del message["reasoning"]
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict):
            if isinstance(call.get("id"), int):
                call["id"] = str(call["id"])
            function = call.get("function")
            if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
                function["arguments"] = orjson.dumps(function["arguments"]).decode()


def _text(parts: Any) -> str:
    """The text of a list of parts; other types of parts have none."""
    if isinstance(parts, str):
        return parts
    texts = [one.get("text") for one in parts if isinstance(one, dict)] if isinstance(parts, list) else []
    return "".join([one for one in texts if isinstance(one, str)])
