from collections.abc import Callable
from pathlib import Path

import pytest

from ops.replay.options import ReplayError
from ops.replay.trace import read_trace

DATA = Path(__file__).parents[2] / "benchmarks" / "data" / "azure_llm_conv_2023_2000.csv"
Azure = Callable[..., Path]


def test_the_shipped_excerpt_has_its_two_thousand_rows() -> None:
    trace = read_trace(DATA)
    assert (trace.format, len(trace.arrivals)) == ("azure", 2000)
    first, second = trace.arrivals[:2]
    assert (first.at_s, first.input_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.at_s == pytest.approx(4.314579, abs=1e-6)
    assert trace.span_s == pytest.approx(424.259456, abs=1e-3)


def test_limit_and_skip_choose_rows_and_time_begins_at_the_first_of_them() -> None:
    trace = read_trace(DATA, limit=3, skip=1)
    assert [a.input_tokens for a in trace.arrivals] == [396, 879, 91]
    assert trace.arrivals[0].at_s == 0.0


def test_rows_out_of_order_are_put_in_order(azure: Azure) -> None:
    trace = read_trace(azure((5.0, 2, 2), (1.0, 1, 1)))
    assert [(a.at_s, a.input_tokens) for a in trace.arrivals] == [(0.0, 1), (4.0, 2)]


def test_lengths_of_zero_become_one(azure: Azure) -> None:
    (arrival,) = read_trace(azure((0.0, 0, 0))).arrivals
    assert (arrival.input_tokens, arrival.output_tokens) == (1, 1)


def test_times_with_a_zone_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "zoned.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,5,6\n2024-05-10 00:00:01+00:00,5,6\n"
    )
    assert read_trace(path).span_s == pytest.approx(0.99007)


def test_mooncakes_lines_are_read_with_their_blocks(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(
        '{"timestamp": 27, "input_length": 600, "output_length": 4, "hash_ids": [0, 1]}\n\n'
        '{"timestamp": 2027, "input_length": 700, "output_length": 5, "hash_ids": [0, 2]}\n'
    )
    trace = read_trace(path)
    assert (trace.format, trace.block_tokens, trace.span_s) == ("mooncake", 512, 2.0)
    assert [a.block_ids for a in trace.arrivals] == [(0, 1), (0, 2)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no column TIMESTAMP"),
        ("a,b\n1,2\n", "no column TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no rows"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "line 2: not a time"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1\n", "line 2: not a time"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,-1,2\n",
            "line 2: a length is negative",
        ),
        ('{"timestamp": 0}\n', "line 1: expected timestamp"),
        (
            '{"timestamp": NaN, "input_length": 1, "output_length": 1}\n',
            "line 1: a length is negative or the time",
        ),
        (
            '{"timestamp": 0, "input_length": Infinity, "output_length": 1}\n',
            "line 1: expected timestamp",
        ),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}\n[]\n', "line 2: expected"),
    ],
)
def test_what_cannot_be_read_is_named_by_file_and_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.trace"
    path.write_text(content)
    with pytest.raises(ReplayError) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_a_missing_file_is_told_without_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="No such file"):
        read_trace(tmp_path / "none.csv")


def test_a_binary_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(b"TIMESTAMP\xff\xfe\x00")
    with pytest.raises(ReplayError, match="not a text file"):
        read_trace(path)
