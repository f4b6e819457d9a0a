"""The end of a wait at a request's deadline."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from gateway.contracts.values import GenerateRequest
from gateway.errors import DeadlineExceeded


@asynccontextmanager
async def until_deadline(
    request: GenerateRequest, clock: Callable[[], float], during: str
) -> AsyncIterator[None]:
    """``async with until_deadline(request, clock, "during …")``: cancel the block at the caller's deadline.

    Raises DeadlineExceeded in place of that cancellation; ``during`` is a part of its message.
    """
    if request.deadline is None:
        yield
        return
    limit = asyncio.timeout(request.deadline - clock())
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceeded(f"the deadline passed {during}") from None
