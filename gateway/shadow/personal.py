"""Finds personal data by its format: mail addresses, telephone and card numbers, and the like.

Names and street addresses have no format; they need a redactor of the operator (``shadow.redact``). A number
is a card or bank account number only when its check digits are correct, so prices and order numbers stay.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import orjson
from msgspec.structs import replace

from budgeting.values import Tool, ToolCall
from observability.redact import scrub

Redactor = Callable[[str], str]
"""Returns a text without content that must not be stored or sent. Called in a thread; if it raises, the text
is neither stored nor sent."""

_MAIL = re.compile(r"[A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}(?![A-Za-z0-9])")
_IP = re.compile(r"(?<![\d.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\d.])")
_IBAN = re.compile(r"(?<![A-Za-z0-9])[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?(?![A-Za-z0-9])")
_CARD = re.compile(r"(?<![\d-])\d(?:[ -]?\d){12,18}(?![\d-])")
_SSN = re.compile(r"(?<![\d-])(?!000|666|9\d\d)\d{3}-(?!00)\d{2}-(?!0000)\d{4}(?![\d-])")
# With a plus, or at least ten digits in groups, unlike a year or a price. Letters of other scripts may be
# adjacent, as in Japanese.
_PHONE = re.compile(
    r"(?<![A-Za-z0-9_+.])(?:\+\d{1,3}[ .-]?(?:\(?\d{1,4}\)?[ .-]?){2,5}\d{2,4}"
    r"|\(?0?\d{2,4}\)?[ .-]\d{3,4}[ .-]\d{3,4})(?![A-Za-z0-9_-])"
)


def redact_personal(text: str) -> str:
    """Replace personal data by ``[mail]``, ``[phone]`` and the like, and remove credentials."""
    text = scrub(text)
    if "@" in text:
        text = _MAIL.sub("[mail]", text)
    if not any(map(str.isdigit, text)):
        return text
    text = _IBAN.sub(lambda found: "[iban]" if _is_iban(found[0]) else found[0], text)
    text = _CARD.sub(lambda found: "[card]" if _is_card(found[0]) else found[0], text)
    text = _SSN.sub("[ssn]", text)
    text = _IP.sub("[ip]", text)
    return _PHONE.sub("[phone]", text)


def redact_json(text: str, redact: Redactor) -> str:
    """Redact each string and number of a JSON text; a text that is not JSON is redacted as a whole."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return redact(text)
    clean = redact_value(value, redact)
    return text if clean == value else orjson.dumps(clean).decode()


def redact_value(value: Any, redact: Redactor) -> Any:
    """Redact each string, number and key of a JSON value."""
    if isinstance(value, dict):
        return {redact(key): redact_value(item, redact) for key, item in value.items()}
    if isinstance(value, list):
        return [redact_value(item, redact) for item in value]
    if value is None or isinstance(value, bool):
        return value
    shown = str(value)
    clean = redact(shown)
    return value if clean == shown else clean


def redact_calls(calls: Sequence[ToolCall], redact: Redactor) -> tuple[ToolCall, ...]:
    return tuple([replace(call, arguments=redact_json(call.arguments, redact)) for call in calls])


def redact_tools(tools: Sequence[Tool], redact: Redactor) -> tuple[Tool, ...]:
    return tuple(
        [
            replace(
                tool,
                description=tool.description and redact(tool.description),
                parameters=tool.parameters and redact_json(tool.parameters, redact),
                format=tool.format and redact_json(tool.format, redact),
            )
            for tool in tools
        ]
    )


def _is_card(text: str) -> bool:
    """Whether the number has a valid Luhn check digit."""
    total = 0
    for place, digit in enumerate(reversed([int(one) for one in text if one.isdigit()])):
        doubled = digit * 2 if place % 2 else digit
        total += doubled - 9 if doubled > 9 else doubled
    return total % 10 == 0


def _is_iban(text: str) -> bool:
    """Whether the number has valid check digits by ISO 13616."""
    plain = text.replace(" ", "")
    if not 15 <= len(plain) <= 34:
        return False
    return int("".join(str(int(one, 36)) for one in plain[4:] + plain[:4])) % 97 == 1
