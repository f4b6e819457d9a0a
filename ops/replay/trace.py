"""Reads a trace: the arrival time of each request and the lengths of prompt and answer; it has no text.

Two formats; the file's first character distinguishes them:

* Azure's CSV with the header ``TIMESTAMP,ContextTokens,GeneratedTokens`` (times to 100 ns, no zone);
* Mooncake's JSON lines with ``timestamp`` (ms), ``input_length``, ``output_length`` and ``hash_ids``, one id
  per 512-token block of the prompt, where equal leading ids mean an equal beginning.
"""

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TextIO

from ops.replay.options import ReplayError

MOONCAKE_BLOCK_TOKENS = 512
# Most rows read of one trace; the longest public ones have 28 million.
MAX_ROWS = 1_000_000
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Args:
        at_s: seconds after the first request of those read.
        input_tokens: length of the prompt, at least 1.
        output_tokens: length of the answer, at least 1.
        block_ids: ids of the prompt's blocks; empty when the trace has none.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """The rows read, in order of arrival; ``block_tokens`` is 0 if the trace has no blocks."""

    path: str
    format: str
    arrivals: tuple[TraceRequest, ...]
    block_tokens: int = 0

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.arrivals[-1].at_s


def read_trace(path: Path, *, limit: int | None = None, skip: int = 0) -> Trace:
    """Read ``limit`` rows of a trace after the first ``skip``. Raises ReplayError."""
    wanted = MAX_ROWS if limit is None else min(limit, MAX_ROWS)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            mooncake = file.read(1) == "{"
            file.seek(0)
            rows = _mooncake(path, file) if mooncake else _azure(path, file)
            read = list(islice(rows, skip, skip + wanted))
    except OSError as error:
        raise ReplayError(f"{path}: {error.strerror or type(error).__name__}") from error
    except UnicodeDecodeError as error:
        raise ReplayError(f"{path}: not a text file in UTF-8 (byte {error.start})") from error
    if not read:
        raise ReplayError(f"{path}: no rows (after skipping {skip})")
    read.sort(key=lambda arrival: arrival.at_s)
    first = read[0].at_s
    arrivals = tuple(TraceRequest(a.at_s - first, a.input_tokens, a.output_tokens, a.block_ids) for a in read)
    return Trace(
        path=str(path),
        format="mooncake" if mooncake else "azure",
        arrivals=arrivals,
        block_tokens=MOONCAKE_BLOCK_TOKENS if mooncake else 0,
    )


def _azure(path: Path, file: TextIO) -> Iterator[TraceRequest]:
    rows = csv.DictReader(file)
    missing = [name for name in AZURE_COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        raise ReplayError(
            f"{path}: no column {', '.join(missing)}; expected the header {','.join(AZURE_COLUMNS)}, "
            "or JSON lines as Mooncake's"
        )
    for number, row in enumerate(rows, start=2):
        try:
            at_s = _seconds(row["TIMESTAMP"])
            lengths = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (TypeError, ValueError) as error:
            raise ReplayError(f"{path}: line {number}: not a time and two whole numbers") from error
        yield _arrival(path, number, at_s, *lengths)


def _mooncake(path: Path, file: TextIO) -> Iterator[TraceRequest]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            at_s = float(row["timestamp"]) / 1000
            lengths = int(row["input_length"]), int(row["output_length"])
            blocks = tuple(int(block) for block in row.get("hash_ids", ()))
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise ReplayError(
                f"{path}: line {number}: expected timestamp, input_length, output_length, hash_ids"
            ) from error
        yield _arrival(path, number, at_s, *lengths, blocks)


def _arrival(
    path: Path, number: int, at_s: float, input_tokens: int, output_tokens: int, blocks: tuple[int, ...] = ()
) -> TraceRequest:
    if input_tokens < 0 or output_tokens < 0 or not math.isfinite(at_s):
        raise ReplayError(f"{path}: line {number}: a length is negative or the time is not finite")
    return TraceRequest(at_s, max(1, input_tokens), max(1, output_tokens), blocks)


def _seconds(stamp: str) -> float:
    """Seconds since 1970 of ``2023-11-16 18:15:46.6805900``, to a microsecond."""
    moment = datetime.fromisoformat(stamp.strip())
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
