"""Reads and checks the lines of a batch's input file, and puts them in the order of execution."""

import hashlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final

import msgspec
import orjson

from accounting.batch_tables import BatchLine
from gateway.contracts.refusals import FEW_FIELDS_BYTES, check_fields
from gateway.contracts.refusals import given as shown
from gateway.errors import InvalidRequest

MAX_ERRORS: Final = 100  # most faults that are reported of one file
MAX_LINE_BYTES: Final = 8 << 20
MAX_CUSTOM_ID: Final = 512
PREFIX_LENGTHS_BYTES: Final = (256, 1_024, 4_096, 16_384)
"""Lengths of the prompt prefixes by which lines are sorted, in bytes of JSON."""
_DIGEST: Final = 6


@dataclass(frozen=True, slots=True)
class LineFault:
    """A fault of a line, in OpenAI's form; ``line`` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """The lines of a file in the order of execution, or the faults of the file."""

    lines: Sequence[BatchLine] = ()
    faults: Sequence[LineFault] = ()
    model: str | None = None


class _Line(msgspec.Struct):
    body: msgspec.Raw


_LINE: Final = msgspec.json.Decoder(_Line)

BodyFault = Callable[[bytes], LineFault | None]
"""Checks a body by a contract; returns the fault, if there is one."""


def checked(
    batch_id: str, endpoint: str, chunks: Iterable[bytes], body_fault: BodyFault, *, max_lines: int
) -> CheckedFile:
    """Check a whole file. Only ids, places and digests of its lines are held in memory."""
    faults: list[LineFault] = []
    found: list[tuple[bytes, int, int, int, str]] = []
    seen: set[str] = set()
    models: set[str] = set()
    for number, start, line in split(chunks):
        if len(faults) >= MAX_ERRORS:
            break
        if number > max_lines:
            faults.append(LineFault("too_many_lines", f"the file has more than {max_lines} lines", number))
            break
        given = _parsed(line, number, endpoint, seen)
        if isinstance(given, LineFault):
            faults.append(given)
            continue
        custom_id, body = given
        try:
            orjson.dumps(body)
            data = body_of(line)
        except (TypeError, RecursionError):  # deeper nesting is read than can be written
            faults.append(LineFault("invalid_body", "body is nested too deeply", number, "body"))
            continue
        if (wrong := body_fault(data)) is not None:
            faults.append(replace(wrong, line=number))
            continue
        if isinstance(model := body.get("model"), str):
            models.add(model)
        found.append((_order(body), number, start, len(line), custom_id))
    if not found and not faults:
        faults.append(LineFault("empty_file", "the file has no lines"))
    if faults:
        return CheckedFile(faults=faults)
    found.sort()
    lines = [
        BatchLine(batch_id, place, number, custom_id, start, size)
        for place, (_, number, start, size, custom_id) in enumerate(found)
    ]
    return CheckedFile(lines, model=models.pop() if len(models) == 1 else None)


def split(chunks: Iterable[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """The lines that are not blank: number from 1, place in bytes, content. A line over the bound is cut.

    A byte order mark at the start of the file belongs to no line.
    """
    held, number, start = bytearray(), 0, 0
    for chunk in chain(chunks, (b"\n",)):
        held += chunk
        if len(held) > MAX_LINE_BYTES and b"\n" not in chunk:
            del held[MAX_LINE_BYTES + 1 :]  # still over the bound, so reported as too long
        at = 0
        while (end := held.find(b"\n", at)) >= 0:
            number += 1
            if number == 1 and held.startswith(BOM_UTF8):
                at = len(BOM_UTF8)
            line = bytes(held[at:end])
            if line.strip():
                yield number, start + at, line
            at = end + 1
        start += at
        del held[:at]


def body_of(line: bytes) -> bytes:
    """The body of a line as its client wrote it: parsed, integers of more than 64 bits would be floats."""
    return bytes(_LINE.decode(line).body)


def _parsed(
    line: bytes, number: int, endpoint: str, seen: set[str]
) -> tuple[str, Mapping[str, Any]] | LineFault:
    if len(line) > MAX_LINE_BYTES:
        return LineFault("line_too_long", f"the line has more than {MAX_LINE_BYTES} bytes", number)
    try:
        if len(line) > FEW_FIELDS_BYTES:
            check_fields(line)
        given = orjson.loads(line)
    except InvalidRequest as refused:
        return LineFault("invalid_request", refused.message, number)
    except orjson.JSONDecodeError:
        return LineFault("invalid_json_line", "the line is not JSON", number)
    if not isinstance(given, dict):
        return LineFault("invalid_json_line", "the line is not a JSON object", number)
    custom_id, body = given.get("custom_id"), given.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID or "\x00" in custom_id:
        problem = f"is {shown(custom_id)}" if "custom_id" in given else "is missing"
        text = f"custom_id {problem}; allowed: a string of 1 to {MAX_CUSTOM_ID} characters without U+0000"
        return LineFault("invalid_custom_id", text, number, "custom_id")
    if custom_id in seen:
        text = "custom_id stands in an earlier line too; allowed: each once"
        return LineFault("duplicate_custom_id", text, number, "custom_id")
    seen.add(custom_id)
    if given.get("method") != "POST":
        return LineFault("invalid_method", "method is not POST", number, "method")
    if given.get("url") != endpoint:
        text = f"url is not the batch's endpoint; allowed: {endpoint}"
        return LineFault("invalid_url", text, number, "url")
    if not isinstance(body, dict):
        return LineFault("invalid_body", "body is not a JSON object", number, "body")
    for name in ("stream", "background"):
        if body.get(name):
            text = f"body.{name} is true; allowed: false: a line has one whole answer"
            return LineFault("invalid_body", text, number, f"body.{name}")
    return custom_id, body


def _order(body: Mapping[str, Any]) -> bytes:
    """A sort key of the digests of prompt prefixes: lines that share a long prefix become neighbours."""
    parts = (body.get("model"), body.get("instructions"), body.get("tools"), body.get("system"))
    prompt = next((body[name] for name in ("messages", "input", "prompt") if name in body), None)
    text = orjson.dumps((*parts, prompt))[: PREFIX_LENGTHS_BYTES[-1]]
    return b"".join(
        hashlib.blake2b(text[:size], digest_size=_DIGEST).digest() for size in PREFIX_LENGTHS_BYTES
    )
