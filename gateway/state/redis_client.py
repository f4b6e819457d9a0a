"""The Redis client: bounded, with timeouts, and without retries.

By default redis-py sends a command again when a connection breaks; a script that appends would then append
twice. So this client sends no command twice; a caller that may try again does so itself.
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
# Longest time, in seconds, to connect, to wait for an answer, and to wait for a free connection.
TIMEOUT_S = 2.0
MAX_REASON = 200  # longest logged reason, in characters
# The errors of an operation if Redis is unreachable, refuses the command, or does not know it. uvloop raises
# RuntimeError where redis-py writes to a connection that has just been closed.
REDIS_ERRORS = (RedisError, OSError, RuntimeError)
# Redis is read and takes no writes: its last snapshot failed, or it lacks replicas. redis-py has no classes.
_REFUSALS = ("MISCONF ", "NOREPLICAS ")


def connect(url: str, *, key: str = "state.url", max_connections: int = MAX_CONNECTIONS) -> Redis:
    """Make a client for ``redis://`` or ``rediss://``; it connects at first use.

    Raises ConfigError for an unusable url of the setting ``key``; the message does not show the url.
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
            # Closes the connection of a server that became a replica; its address may lead elsewhere now.
            retry_on_error=[ReadOnlyError],
        )
        pool.connection_class(**pool.connection_kwargs)  # refuses unknown parameters; connects to nothing
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{key}: not a url of Redis, or with an unknown parameter ({type(error).__name__})"
        ) from None
    # from_pool: closing the client closes the pool.
    return Redis.from_pool(pool)


async def ask(client: Redis, operation: str, command: object) -> Any:
    """Return a command's answer. Raises StateUnavailable.

    If a connection breaks, the idle ones are closed too: their server is gone, and each of them would make
    one more command fail after the server's return. So are they if their server became a replica.
    """
    task = asyncio.current_task()
    cancels = 0 if task is None else task.cancelling()
    try:
        # redis-py's type hints cover its synchronous and its asynchronous client together.
        answer = await cast(Awaitable[Any], command)
    except REDIS_ERRORS as error:
        if isinstance(error, ConnectionError | ReadOnlyError):
            with contextlib.suppress(*REDIS_ERRORS):
                await client.connection_pool.disconnect(inuse_connections=False)
        refused = isinstance(error, ReadOnlyError | OutOfMemoryError) or str(error).startswith(_REFUSALS)
        raise StateUnavailable(operation, _reason_of(error), writes_refused=refused) from error
    end_if_cancelled(cancels)
    return answer


def prefix(namespace: str) -> str:
    """Return the prefix of a namespace's keys; the braces put them into one slot of a cluster."""
    return f"sluice:{{{namespace}}}:"


def _reason_of(error: Exception) -> str:
    """Return the error's class, and for a failed connection its text: host and port, but no password.

    Other errors' texts may contain the command's arguments.
    """
    name = type(error).__name__
    return f"{name}: {error}"[:MAX_REASON] if isinstance(error, ConnectionError) else name


def end_if_cancelled(before: int = 0) -> None:
    """Raise the cancellation that redis-py suppressed; there were ``before`` when the command began.

    Until Python 3.13 a task whose TaskGroup has failed counts as cancelled once from then on.

    A task that is cancelled while the client connects may continue (observed with redis-py 8.1 on Python
    3.11; ``tests/state/test_redis_store.py``). A loop that calls this after each command ends as it should.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError
