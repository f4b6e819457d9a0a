import pytest
from hypothesis import given
from hypothesis import strategies as st

from observability.trace_context import Parent, RootSpan, parse_traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_valid_header_is_read() -> None:
    assert parse_traceparent(f"00-{TRACE}-{SPAN}-01") == Parent(TRACE, SPAN, 1)


def test_a_later_version_may_carry_more() -> None:
    assert parse_traceparent(f"cc-{TRACE}-{SPAN}-01-what-ever") == Parent(TRACE, SPAN, 1)


@pytest.mark.parametrize(
    "header",
    [
        None, "", "nonsense", f"00-{TRACE}-{SPAN}", f"00-{TRACE}-{SPAN}-01-more", f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01", f"00-{TRACE}-{SPAN}-1", f"cc-{TRACE}-{SPAN}-01-{'x' * 600}",
    ],
)  # fmt: skip
def test_a_header_that_is_not_valid_begins_a_new_trace(header: str | None) -> None:
    assert parse_traceparent(header) is None


@given(st.text(max_size=80))
def test_no_text_makes_the_parser_fail(header: str) -> None:
    parse_traceparent(header)


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.integers(0, 255))
def test_what_is_written_is_read_back(trace: int, span: int, flags: int) -> None:
    parent = Parent(f"{trace:032x}", f"{span:016x}", flags)
    written = RootSpan(parent.trace_id, span, None, flags, 0).headers(0).decode()
    assert parse_traceparent(written.removeprefix("traceparent:")) == parent
