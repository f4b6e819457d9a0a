"""Checks of whole answers, for comparisons of backends; they never change or hold back an answer."""

from __future__ import annotations

from collections.abc import Callable

import orjson

from gateway.contracts.values import Answer, FormatType, GenerateRequest

AnswerCheck = Callable[[GenerateRequest, Answer], bool | None]
"""Whether an answer is as it should be; ``None``: it has nothing to say of this one. Runs on the event loop
after the answer is whole, so it must be quick; must not raise."""

_JSON = frozenset({FormatType.JSON_OBJECT, FormatType.JSON_SCHEMA})


def in_shape(request: GenerateRequest, answer: Answer) -> bool | None:
    """Whether each text holds something, and is JSON where that was asked; kept texts are not looked at."""
    if answer.fallback is not None:
        return None
    return all(
        choice.text.strip() != "" and (request.response_format.type not in _JSON or _is_json(choice.text))
        for choice in answer.choices
    )


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True
