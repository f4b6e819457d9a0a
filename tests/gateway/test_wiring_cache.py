"""The response cache and the limits of legs that are built from a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from accounting.prices import Price
from gateway.config.errors import ConfigError
from gateway.config.settings import Settings, load_settings
from gateway.generation.answer_cache import AnswerCache
from gateway.wiring.accounts import price_of
from gateway.wiring.cache import make_answers, make_leg_limits
from resilience.leg_limits import LegSkipped
from resilience.response_cache_values import CacheFigures

BEDROCK = {
    "kind": "bedrock",
    "model_id": "anthropic.claude",
    "region": "eu-central-1",
    "price": {"input_usd_per_million": 3.0, "output_usd_per_million": 15.0},
}


def settings(**changes: object) -> Settings:
    return Settings.model_validate({"backends": {"local": {"kind": "engine"}, "bedrock": BEDROCK}, **changes})


def answers(**section: object) -> AnswerCache:
    return make_answers(
        settings(response_cache=section), clock=lambda: 0.0, unix_time=lambda: 0.0, emit=lambda event: None
    )


async def test_by_default_answers_are_stored_in_this_process() -> None:
    made = answers()
    assert made.cache is not None
    assert (made.place, made.figures()) == ("this process", CacheFigures(0, 0))


async def test_no_capacity_is_no_cache() -> None:
    made = answers(capacity=0)
    assert made.cache is None and made.figures() is None


async def test_redis_is_shown_without_its_password() -> None:
    made = answers(url="rediss://user:secret@cache.internal:6380/2?password=secret")
    assert made.cache is not None
    assert made.place == "rediss://cache.internal:6380/2"
    await made.cache.close()


@pytest.mark.parametrize("url", ["memcached://secret@host", "redis://", "redis://:secret@host:port"])
def test_an_address_that_cannot_be_used_stops_the_start_and_shows_no_secret(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        answers(url=url)
    assert str(caught.value).startswith("response_cache.url: ") and "secret" not in str(caught.value)


def test_prices_are_whole_nano_dollars_and_cached_tokens_cost_as_the_others_unless_said() -> None:
    price = settings().price("bedrock")
    assert price is not None and price_of(price) == Price(3 * 10**9, 15 * 10**9, 3 * 10**9)
    cached = {
        **BEDROCK,
        "price": {**BEDROCK["price"], "cached_usd_per_million": 0.3, "cache_write_usd_per_million": 3.75},
    }  # type: ignore[dict-item]
    made = Settings.model_validate({"backends": {"local": {"kind": "engine"}, "bedrock": cached}})
    price = made.price("bedrock")
    assert price is not None and price_of(price) == Price(3 * 10**9, 15 * 10**9, 3 * 10**8, 3_750_000_000)


def test_limits_of_legs_come_from_the_configuration() -> None:
    skipped: list[LegSkipped] = []
    limits = make_leg_limits(
        settings(fallback={"limits": {"bedrock": {"max_concurrency": 1, "max_spend_usd_per_minute": 0.001}}}),
        clock=lambda: 0.0,
        emit=skipped.append,
        cost={"bedrock": Price(3 * 10**9, 15 * 10**9, 3 * 10**9).cost_nanousd}.__getitem__,
    )
    assert limits.enter("bedrock", 0, 67) is None, "67 × 15 millionths are over 0.001"
    assert limits.enter("bedrock", 0, 66) is not None
    assert limits.enter("bedrock", 0, 0) is None
    assert [event.reason for event in skipped] == ["spend", "concurrency"]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ("{pool: {max_concurrency: 1}}", "no such backend; allowed: bedrock, local"),
        ("{local: {max_spend_usd_per_minute: 1}}", "needs backends.local.price"),
        ("{bedrock: {max_concurrency: 0}}", "greater than or equal to 1"),
    ],
)
def test_a_limit_that_means_nothing_stops_the_start(tmp_path: Path, limits: str, message: str) -> None:
    path = tmp_path / "sluice.yaml"
    path.write_text(
        "backends:\n  local: {kind: engine}\n  bedrock: {kind: bedrock, model_id: m, region: eu-central-1}\n"
        f"fallback: {{limits: {limits}}}\n"
    )
    with pytest.raises(ConfigError, match=message):
        load_settings(path, {})


def test_tenants_budgets_where_nothing_has_a_price_stop_the_start() -> None:
    budgets = {"tenant_budgets": {"acme": {"usd_per_day": 5}}}
    with pytest.raises(ValidationError, match=r"auth\.tenant_budgets needs a price, else it limits nothing"):
        Settings.model_validate({"auth": budgets})
    assert settings(auth=budgets).auth.tenant_budgets
