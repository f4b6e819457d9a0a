"""The lines of a batch's input file: what is wrong with them, and the order in which they run."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from codecs import BOM_UTF8
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.batches import reading
from gateway.batches.reading import MAX_ERRORS, MAX_LINE_BYTES, LineFault, body_of, checked, split

CHAT = "/v1/chat/completions"


def line(custom_id: str = "a", **changes: Any) -> bytes:
    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
    return json.dumps(
        {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body, **changes}
    ).encode()


def faults(*lines: bytes, max_lines: int = 9, body_fault: Any = lambda body: None) -> list[tuple[Any, ...]]:
    found = checked("b", CHAT, iter([b"\n".join(lines)]), body_fault, max_lines=max_lines)
    assert not found.lines
    return [(one.line, one.code, one.param) for one in found.faults]


@pytest.mark.parametrize(
    ("wrong", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (line(""), "invalid_custom_id", "custom_id"),
        (line("x" * 513), "invalid_custom_id", "custom_id"),
        (line("a\0b"), "invalid_custom_id", "custom_id"),
        (b'{"method": "POST"}', "invalid_custom_id", "custom_id"),
        (line(method="GET"), "invalid_method", "method"),
        (line(url="/v1/embeddings"), "invalid_url", "url"),
        (line(body=None), "invalid_body", "body"),
        (line(body={"stream": True}), "invalid_body", "body.stream"),
        (line(body={"background": True}), "invalid_body", "body.background"),
        (
            line(body=0).replace(b'"body": 0', b'"body":{"a":' + b"[" * 400 + b"]" * 400 + b"}"),
            "invalid_body",
            "body",
        ),
    ],
)
def test_a_wrong_line_is_named_with_its_number(wrong: bytes, code: str, param: str | None) -> None:
    assert faults(line("first"), b"", wrong, line("last")) == [(3, code, param)]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (line("x" * 513), "is a string of 513 characters"),
        (line(""), "is a string of 0 characters"),
        (line(custom_id=7), "is 7"),  # type: ignore[arg-type]
        (b"{}", "is missing"),
    ],
    ids=["long", "empty", "number", "absent"],
)
def test_a_wrong_id_of_a_line_is_described_with_what_is_allowed(wrong: bytes, problem: str) -> None:
    found = checked("b", CHAT, iter([wrong]), lambda body: None, max_lines=9)
    text = f"custom_id {problem}; allowed: a string of 1 to 512 characters without U+0000"
    assert [one.message for one in found.faults] == [text]


def test_a_line_of_very_many_arrays_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing in a thread holds up the event loop too, because it keeps the interpreter's lock."""
    wrong = line(body=0).replace(b'"body": 0', b'"body":{"a":[' + b"[]," * 100_000 + b"[]]}")
    monkeypatch.setattr(reading.orjson, "loads", pytest.fail)
    assert faults(wrong) == [(1, "invalid_request", None)]


def test_a_repeated_id_and_too_many_lines_are_refused() -> None:
    assert faults(line("a"), line("b"), line("a")) == [(3, "duplicate_custom_id", "custom_id")]
    wrong = (1, "invalid_method", "method"), (2, "duplicate_custom_id", "custom_id")
    assert faults(line("a", method="GET"), line("a")) == [*wrong], "also where the earlier line has a fault"
    assert faults(line("a"), line("b"), line("c"), max_lines=2) == [(3, "too_many_lines", None)]
    assert faults(b"", b"  ") == [(None, "empty_file", None)]
    assert len(faults(*[b"{"] * 300, max_lines=999)) == MAX_ERRORS


def test_what_the_contract_refuses_is_a_fault_of_the_line() -> None:
    def refuse(body: bytes) -> LineFault | None:
        wrong = json.loads(body).get("temperature") == 99
        return LineFault("invalid_request", "temperature is 99", None, "body.temperature") if wrong else None

    hot = line("hot", body={"temperature": 99})
    assert faults(line("a"), hot, body_fault=refuse) == [(2, "invalid_request", "body.temperature")]


def test_a_body_is_checked_and_run_as_its_client_wrote_it() -> None:
    body, seen = b'{"seed": 123456789012345678901234567890,  "temperature": 0.10}', list[bytes]()
    given = line(body=0).replace(b'"body": 0', b'"body": ' + body)

    def body_fault(data: bytes) -> None:
        seen.append(data)

    assert checked("b", CHAT, iter([given]), body_fault, max_lines=9).lines
    assert [*seen, body_of(given)] == [body, body]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 1_000])
def test_a_byte_order_mark_before_the_first_line_is_skipped_however_the_file_is_cut(size: int) -> None:
    data = BOM_UTF8 + b"\n".join((line("a"), line("b")))
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    found = checked("b", CHAT, iter(pieces), lambda body: None, max_lines=9)
    places = {one.custom_id: data[one.start : one.start + one.size] for one in found.lines}
    assert places == {"a": line("a"), "b": line("b")}
    assert faults(BOM_UTF8) == [(None, "empty_file", None)]
    assert faults(line("a"), BOM_UTF8 + line("b")) == [(2, "invalid_json_line", None)]


def test_a_line_that_is_too_long_is_reported_and_not_kept_in_memory() -> None:
    def endless() -> Any:
        yield line("a") + b"\n"
        for _ in range(64):
            yield b"x" * (1 << 20)

    tracemalloc.start()
    try:
        found = checked("b", CHAT, endless(), lambda body: None, max_lines=9)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [(one.line, one.code) for one in found.faults] == [(2, "line_too_long")]
    assert most < 5 * MAX_LINE_BYTES


@given(
    st.lists(st.binary(max_size=12).filter(lambda one: b"\n" not in one), max_size=8),
    st.integers(1, 9),
    st.booleans(),
)
def test_lines_are_found_where_they_are_however_the_file_is_cut(
    parts: list[bytes], size: int, ended: bool
) -> None:
    content = b"\n".join(parts) + (b"\n" if ended else b"")
    chunks = [content[at : at + size] for at in range(0, len(content), size)]
    found = list(split(chunks))
    assert [(number, text) for number, _, text in found] == [
        (number, part) for number, part in enumerate(parts, 1) if part.strip()
    ]
    assert all(content[start : start + len(text)] == text for _, start, text in found)


def test_lines_whose_prompts_begin_alike_are_neighbours() -> None:
    def asked(number: int) -> bytes:
        shared = ("You sell manga. " * 40, "You sell books. " * 40, "You sell tea. " * 40)[number % 3]
        messages = [{"role": "system", "content": shared}, {"role": "user", "content": f"Question {number}"}]
        return line(f"r{number}", body={"model": "demo", "messages": messages})

    content = b"\n".join(asked(number) for number in range(60))
    found = checked("b", CHAT, iter([content]), lambda body: None, max_lines=99)
    shops = [int(one.custom_id[1:]) % 3 for one in found.lines]
    assert sum(before != after for before, after in itertools.pairwise(shops)) == 2
    assert sorted(one.number for one in found.lines) == list(range(1, 61))
    assert [one.place for one in found.lines] == list(range(60))
    assert found.model == "demo"
