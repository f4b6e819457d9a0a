"""The longest that a request may take in all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from gateway.errors import DeadlineExceeded
from gateway.requests.request_record import RequestRecorder


@contextlib.asynccontextmanager
async def in_time(timeout_s: float, trip: RequestRecorder) -> AsyncIterator[None]:
    """Cut the block off after ``timeout_s``; that is an error of its own, no caller who left.

    Raises:
        DeadlineExceeded: the time was over.
    """
    try:
        async with asyncio.timeout(timeout_s) as trip.limit:
            yield
    except TimeoutError:
        if not trip.late:
            raise
        raise DeadlineExceeded(f"the request took longer than {timeout_s:g} s") from None
