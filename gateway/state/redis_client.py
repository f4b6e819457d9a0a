"""The Redis client: bounded, with timeouts, and without retries.

redis-py by default sends a command again when a connection breaks; a script that appends would then append
twice. So nothing is sent twice here; callers that may try again do so themselves.
"""

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any, cast

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, OutOfMemoryError, ReadOnlyError, RedisError

from gateway.config.errors import ConfigError
from gateway.state.errors import StateUnavailable

MAX_CONNECTIONS = 16
# Longest time to connect, for an answer, and for a free connection of the pool.
TIMEOUT_S = 2.0
# Longest reason that is logged, in characters.
MAX_REASON = 200
# What an operation raises when Redis is unreachable, refuses, or does not know the command.
REDIS_ERRORS = (RedisError, OSError)


def connect(url: str, *, max_connections: int = MAX_CONNECTIONS) -> Redis:
    """A client of ``redis://`` or ``rediss://``; connects when it is first used.

    Raises ConfigError: the url cannot be used; it is not shown.
    """
    try:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=max_connections,
            timeout=TIMEOUT_S,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 0),
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"state.url: not a url of Redis ({type(error).__name__})") from None
    # from_pool: closing the client closes the pool.
    return Redis.from_pool(pool)


async def ask(client: Redis, operation: str, command: object) -> Any:
    """A command's answer. Raises StateUnavailable.

    When a connection breaks, the idle ones are closed too: their server is gone, and each would fail one more
    command after its return.
    """
    try:
        # redis-py types its commands for both of its clients at once.
        answer = await cast(Awaitable[Any], command)
    except REDIS_ERRORS as error:
        if isinstance(error, ConnectionError):
            with contextlib.suppress(*REDIS_ERRORS):
                await client.connection_pool.disconnect(inuse_connections=False)
        refused = isinstance(error, ReadOnlyError | OutOfMemoryError)
        raise StateUnavailable(operation, _reason_of(error), writes_refused=refused) from error
    end_if_cancelled()
    return answer


def prefix(namespace: str) -> str:
    """The prefix of a namespace's keys; the braces put them into one slot of a cluster."""
    return f"sluice:{{{namespace}}}:"


def _reason_of(error: Exception) -> str:
    """The error's class; for a failed connection also its text, which has host and port but no password.

    Other texts may repeat what was sent.
    """
    name = type(error).__name__
    return f"{name}: {error}"[:MAX_REASON] if isinstance(error, ConnectionError) else name


def end_if_cancelled() -> None:
    """Raise the cancellation that redis-py lost.

    A task that is cancelled while the client connects may continue (observed with redis-py 8.1 on Python
    3.11; ``tests/state/test_redis_store.py``). A loop that calls this after each command ends anyway.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
