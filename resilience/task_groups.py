"""A task group for work of which the first error counts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def all_or_error() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup that raises its first error itself, not in a group.

    Until Python 3.13 a task whose TaskGroup has failed counts as cancelled once more from then on, so that
    the cancellation of a caller who leaves would not be recognized; here it does not.
    """
    task = asyncio.current_task()
    before = 0 if task is None else task.cancelling()
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        if task is not None and task.cancelling() > before:
            task.uncancel()
        raise errors.exceptions[0] from None
