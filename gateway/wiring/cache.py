"""Builds the response cache, and the limits of fallback targets."""

import re
from collections.abc import Callable

from gateway.config.errors import ConfigError
from gateway.config.settings import Settings
from gateway.generation.answer_cache import AnswerCache
from gateway.keys.ceilings import NANOUSD
from gateway.wiring.state_store import connect
from resilience.leg_limits import Cost, LegLimit, LegLimits, LegSkipped
from resilience.response_cache import ResponseCache
from resilience.response_cache_memory import MemoryStore
from resilience.response_cache_values import CacheEvent, Store

MAX_CONNECTIONS = 8  # connections to Redis; a lookup and a write each use one at a time


def make_answers(
    settings: Settings,
    *,
    clock: Callable[[], float],
    unix_time: Callable[[], float],
    emit: Callable[[CacheEvent], None],
) -> AnswerCache:
    """Build the response cache. Raises ConfigError for its url."""
    section = settings.response_cache
    deployment = settings.engine.model_id
    if section.capacity == 0:
        return AnswerCache(None, deployment, "nothing is kept")
    # Processes that share a store must measure the age of an answer by the same clock.
    shared = section.url is not None
    store, place = _store(settings, clock=clock, unix_time=unix_time)
    cache = ResponseCache(
        store,
        clock=unix_time if shared else clock,
        emit=emit,
        timeout_s=section.timeout_ms / 1000,
        outbox=section.outbox,
    )
    return AnswerCache(cache, deployment, place)


def make_leg_limits(
    settings: Settings,
    *,
    clock: Callable[[], float],
    emit: Callable[[LegSkipped], None],
    cost: Callable[[str], Cost],
) -> LegLimits:
    """Build the limits of ``fallback.limits``; ``cost`` returns the cost function of a target."""
    limits = {}
    for name, section in settings.fallback.limits.items():
        spend = section.max_spend_usd_per_minute
        most_nanousd = None if spend is None else max(1, round(spend * NANOUSD))
        limits[name] = LegLimit(section.max_concurrency, most_nanousd, cost(name))
    return LegLimits(limits, clock=clock, emit=emit)


def _store(
    settings: Settings, *, clock: Callable[[], float], unix_time: Callable[[], float]
) -> tuple[Store, str]:
    section = settings.response_cache
    if section.url is None:
        store = MemoryStore(
            capacity=section.capacity, max_bytes=section.max_bytes, ttl_s=section.ttl_seconds, clock=clock
        )
        return store, "this process"
    if not re.match(r"rediss?://\S+$", section.url):
        raise ConfigError("response_cache.url: allowed: redis://HOST[:PORT][/DB], rediss://…, or unset")
    client = connect(section.url, "response_cache.url", max_connections=MAX_CONNECTIONS)
    from gateway.state.redis_client import prefix
    from resilience.response_cache_redis import RedisStore

    store_of_all = RedisStore(
        client,
        prefix=f"{prefix(settings.state.namespace)}cache:",
        ttl_s=section.ttl_seconds,
        unix_time=unix_time,
    )
    return store_of_all, re.sub(r"^(rediss?://)(.*@)?([^?]*).*$", r"\1\3", section.url)
