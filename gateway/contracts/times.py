"""Times in the queries of reports, and in what operators are shown."""

import math
from datetime import UTC, datetime
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator

TIMES: Final = "an ISO 8601 time with an offset, a day as 2026-11-22 (UTC), or seconds since 1970"
_LAST_S: Final = 32_503_680_000.0  # the year 3000: no row starts later, and dates must end somewhere


def _unix_time(given: str) -> float:
    try:
        found = _seconds(given.strip())
    except ValueError:
        found = math.nan
    if not 0 <= found <= _LAST_S:
        raise ValueError(f"allowed: {TIMES}")
    return found


def _seconds(given: str) -> float:
    try:
        return float(given)
    except ValueError:
        pass
    # An unescaped plus sign in the query arrives as a space.
    moment = datetime.fromisoformat(given.replace(" ", "+") if "T" in given else given)
    if moment.tzinfo is None:
        if "T" in given:
            raise ValueError
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp()


def iso_time(at: float, precision: Literal["seconds", "milliseconds", "microseconds"] = "seconds") -> str:
    """Return Unix seconds as an ISO 8601 time in UTC."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec=precision)


Time = Annotated[float, BeforeValidator(_unix_time, json_schema_input_type=str)]
"""A time as Unix seconds, given in one of the forms of ``TIMES``."""
