"""The price book: which price applies to which row at which time, and that costs are exact."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from accounting.account import Accounts
from accounting.errors import PriceError
from accounting.prices import BookVersion, Price, PriceBook, Tariff, with_backends
from gateway.config.errors import ConfigError
from gateway.config.price_file import read_price_file
from gateway.config.settings import Settings
from gateway.wiring.accounts import leg_costs, make_prices
from tests.accounting.test_account import ListOutbox
from tests.accounting.test_ledger import row

USD = 10**9
CHEAP, DEAR, OWN = (Price(n * USD, 2 * n * USD, 0) for n in (1, 5, 9))
SPENT = row(
    "gen_1", backend_name="local", input_tokens=1_000_000, output_tokens=1_000_000, cached_tokens=400_000
)


def book(*tariffs: Tariff) -> PriceBook:
    return PriceBook([BookVersion("v1", 0.0, tariffs)])


def test_the_adapter_goes_before_the_model_before_the_backend_before_the_rest() -> None:
    prices = [Price(n, n, n) for n in range(4)]
    made = book(
        Tariff(prices[0]),
        Tariff(prices[1], backend="local"),
        Tariff(prices[2], model="llama"),
        Tariff(prices[3], adapter="manga"),
    )
    asked = [
        ("other", None, None),
        ("local", None, None),
        ("local", "llama", None),
        ("local", "llama", "manga"),
    ]
    assert [made.price(1.0, *one) for one in asked] == prices


def test_a_model_goes_before_a_pattern_and_one_of_a_pools_before_the_pool() -> None:
    prices = [Price(n, n, n) for n in range(6)]
    made = book(
        Tariff(prices[0], backend="gpus"),
        Tariff(prices[1], backend="gpus/llama-70b"),
        Tariff(prices[2], model="qwen*"),
        Tariff(prices[3], model="qwen*-8b"),
        Tariff(prices[4], model="qwen3-8b"),
        Tariff(prices[5], model="a.b*c"),
    )
    asked = [
        ("gpus/llama-1b", "llama-1b"),
        ("gpus/llama-70b", "an-adapter"),
        ("gpus/qwen3-32b", "qwen3-32b"),
        ("gpus", "qwen2-8b"),
        ("other", "qwen3-8b"),
        ("other", "a.b-and-c"),
    ]
    assert [made.price(1.0, *one) for one in asked] == prices
    assert made.price(1.0, "other", "axbc") is None


def test_a_model_that_a_pool_may_serve_has_its_price_there_unless_the_pool_has_one() -> None:
    usd = {"input_usd_per_million": 1.0, "output_usd_per_million": 2.0}
    pool = {"kind": "openai", "base_urls": ["http://127.0.0.1:9/v1"]}
    own = {"input_usd_per_million": 9.0, "output_usd_per_million": 18.0}
    settings = Settings.model_validate(
        {"backends": {"free": pool, "priced": {**pool, "price": own}}, "models": {"qwen": {"price": usd}}}
    )
    made = make_prices(settings)
    assert made.price(1.0, "free", "qwen") == made.price(1.0, "free/qwen", "its-adapter")
    assert made.price(1.0, "free/qwen", "qwen") == Price(USD, 2 * USD, USD)
    assert made.price(1.0, "free/other", "other") is None
    assert made.price(1.0, "priced/qwen", "qwen") == Price(9 * USD, 18 * USD, 9 * USD)
    assert settings.priced


def test_a_row_is_priced_by_the_version_in_force_when_it_started() -> None:
    made = PriceBook(
        [BookVersion("new", 200.0, (Tariff(DEAR),)), BookVersion("old", 100.0, (Tariff(CHEAP),))]
    )
    found = [made.priced(replace(SPENT, started_at=at)) for at in (99.9, 100.0, 199.9, 200.0)]
    assert [(one.price_version, one.cost_nanousd) for one in found] == [
        (None, 0), ("old", 2_600_000_000), ("old", 2_600_000_000), ("new", 13_000_000_000),
    ]  # fmt: skip


def test_cached_tokens_are_charged_at_the_price_of_cached_tokens() -> None:
    made = book(Tariff(Price(3 * USD, 15 * USD, USD // 2)))
    assert made.priced(SPENT).cost_nanousd == int((0.6 * 3 + 15 + 0.4 * 0.5) * USD)


def test_tokens_written_to_a_cache_are_charged_at_their_price_or_as_other_input() -> None:
    written = replace(SPENT, cache_write_tokens=100_000)
    dear = book(Tariff(Price(3 * USD, 15 * USD, USD // 2, 4 * USD)))
    assert dear.priced(written).cost_nanousd == 17_100_000_000, "0.5 * 3 + 15 + 0.4 * 0.5 + 0.1 * 4"
    plain = book(Tariff(Price(3 * USD, 15 * USD, USD // 2)))
    assert plain.priced(written).cost_nanousd == plain.priced(SPENT).cost_nanousd


def test_a_row_without_a_price_has_no_price_version_and_a_free_row_has_one() -> None:
    made = book(Tariff(Price(0, 0, 0), backend="local"))
    assert made.priced(SPENT).price_version == "v1"
    assert made.priced(replace(SPENT, backend_name="other")).price_version is None
    assert made.priced(row("gen_2", backend_name="degraded")).price_version is None


@given(tokens=st.tuples(*[st.integers(0, 10**7)] * 3), price=st.tuples(*[st.integers(0, 10**17)] * 3))
def test_a_cost_is_the_exact_one_rounded_up(
    tokens: tuple[int, int, int], price: tuple[int, int, int]
) -> None:
    given_in, out, cached = tokens
    cost = Price(*price).cost_nanousd(given_in, out, cached)
    used = min(cached, given_in)
    exact = (given_in - used) * price[0] + out * price[1] + used * price[2]
    assert 0 <= cost * 10**6 - exact < 10**6


def test_an_account_prices_what_it_settles_however_it_ends() -> None:
    outbox = ListOutbox()
    accounts = Accounts(outbox, book(Tariff(CHEAP)).priced)
    with accounts.open(SPENT) as account:
        account.settle(replace(SPENT, finish_reason="stop"))
    with pytest.raises(KeyError), accounts.open(SPENT):
        raise KeyError
    assert [(one.finish_reason, one.cost_nanousd, one.price_version) for one in outbox.rows] == [
        ("stop", 2_600_000_000, "v1"), ("error", 2_600_000_000, "v1"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "versions",
    [
        [BookVersion("a", 1.0, ()), BookVersion("a", 2.0, ())],
        [BookVersion("a", 1.0, ()), BookVersion("b", 1.0, ())],
        [BookVersion("a", 1.0, (Tariff(CHEAP, backend="x"), Tariff(DEAR, backend="x")))],
    ],
)
def test_a_contradictory_book_is_refused(versions: list[BookVersion]) -> None:
    with pytest.raises(PriceError, match="allowed"):
        PriceBook(versions)


# One source of truth


def test_backends_own_prices_join_every_version_and_name_one_where_there_is_none() -> None:
    made = with_backends(
        PriceBook([BookVersion("v1", 100.0, (Tariff(CHEAP, adapter="manga"),))]),
        {"local": OWN},
        version="own",
    )
    assert [one.version for one in made.versions] == ["own", "v1"]
    assert made.price(1.0, "local") == made.price(100.0, "local") == OWN
    assert made.price(100.0, "local", None, "manga") == CHEAP


def test_a_backend_priced_in_both_places_is_refused_with_both() -> None:
    with pytest.raises(PriceError, match=r"version 'v1' of the price file and in backends.local.price"):
        with_backends(book(Tariff(CHEAP, backend="local")), {"local": OWN}, version="own")


PRICED = {"kind": "engine", "price": {"input_usd_per_million": 1, "output_usd_per_million": 2}}
FILE = """
versions:
  - version: "2026-11"
    valid_from: 2026-11-01T00:00:00Z
    prices:
      - {backend: local, input_nanousd: 20, output_nanousd: 80, cached_nanousd: 2}
      - {backend: local, adapter: manga, input_nanousd: 30, output_nanousd: 90, cache_write_nanousd: 38}
"""
NOVEMBER = 1_793_491_200.0


def test_a_price_file_speaks_of_one_token_in_whole_nano_dollars(tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(FILE)
    made = read_price_file(tmp_path / "prices.yaml")
    assert made.price(NOVEMBER - 1, "local") is None
    assert made.price(NOVEMBER, "local") == Price(20 * 10**6, 80 * 10**6, 2 * 10**6)
    assert made.price(NOVEMBER, "local", None, "manga") == Price(
        30 * 10**6, 90 * 10**6, 30 * 10**6, 38 * 10**6
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (FILE.replace("input_nanousd: 20", "input_nanousd: 0.5"), "versions[0].prices[0].input_nanousd: "),
        (FILE.replace("input_nanousd: 20", "input_nanousd: -1"), "given: -1"),
        (FILE.replace("T00:00:00Z", "T00:00:00"), "versions[0].valid_from"),
        (FILE.replace("adapter: manga", "adaptor: manga"), "versions[0].prices[1].adaptor"),
        (FILE.replace("adapter: manga, ", ""), "has two prices"),
        ("[", "not valid YAML"),
        ("", "the file: "),
    ],
)
def test_a_wrong_price_file_stops_the_start_with_the_place(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "prices.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        make_prices(Settings.model_validate({"ledger": {"prices": str(tmp_path / "prices.yaml")}}))
    assert str(caught.value).startswith("ledger.prices: ") and words in str(caught.value)


def test_a_fallback_target_is_priced_by_the_same_book_as_rows(tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(FILE)
    settings = Settings.model_validate(
        {
            "ledger": {"prices": str(tmp_path / "prices.yaml")},
            "fallback": {"limits": {"local": {"max_spend_usd_per_minute": 1}}},
        }
    )
    cost = leg_costs(settings, make_prices(settings), unix_time=lambda: NOVEMBER)
    assert cost("local")(0, 10**6, 0, 0) == 80 * 10**6
    before = leg_costs(settings, make_prices(settings), unix_time=lambda: NOVEMBER - 1)
    with pytest.raises(ConfigError, match="needs a price"):
        before("local")


def test_a_later_price_applies_to_a_fallback_target_from_its_date_on(tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(FILE)
    now = NOVEMBER - 1
    settings = Settings.model_validate({"ledger": {"prices": str(tmp_path / "prices.yaml")}})
    cost = leg_costs(settings, make_prices(settings), unix_time=lambda: now)("local")
    assert cost(0, 10**6, 0, 0) == 0
    now = NOVEMBER
    assert cost(0, 10**6, 0, 0) == 80 * 10**6


def test_a_fallback_target_or_shadow_is_priced_by_its_model_too(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(FILE.replace("{backend: local, ", '{model: "anthropic.*", ', 1))
    haiku = {"kind": "bedrock", "model_id": "anthropic.claude-3-haiku-20240307-v1:0", "region": "us-east-1"}
    settings = Settings.model_validate({"ledger": {"prices": str(file)}, "backends": {"aws": haiku}})
    cost = leg_costs(settings, make_prices(settings), unix_time=lambda: NOVEMBER)
    assert cost("aws")(0, 10**6, 0, 0) == 80 * 10**6


def test_a_backend_may_be_priced_if_a_price_covers_some_adapter_of_it_or_may_cover_its_unknown_model() -> (
    None
):
    tariffs = (
        Tariff(Price(1, 1, 1), backend="local", adapter="manga"),
        Tariff(Price(0, 0, 0), model="qwen3-*"),
    )
    book = PriceBook([BookVersion("v1", NOVEMBER, tariffs)])
    asked = [("local", "demo"), ("gpus/qwen3-8b", "qwen3-8b"), ("gpus", ""), ("gpus", "llama")]
    assert [book.may_price(NOVEMBER, *one) for one in asked] == [True, True, True, False]
    assert not book.may_price(NOVEMBER - 1, "local", "demo")


def test_a_changed_price_of_a_section_is_another_version() -> None:
    settings = Settings.model_validate({"backends": {"local": PRICED}})
    dearer = Settings.model_validate(
        {
            "backends": {
                "local": {**PRICED, "price": {"input_usd_per_million": 2, "output_usd_per_million": 2}}
            }
        }
    )
    [one], [other] = make_prices(settings).versions, make_prices(dearer).versions
    assert one.version.startswith("config-") and one.version != other.version
    assert make_prices(settings).versions[0].version == one.version
