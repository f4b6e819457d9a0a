"""The layer of accounting: the price book, the ledger, and the engines' own token counters."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from accounting.account import Accounts
from accounting.engine_counts import EngineCounts, HourlyCounts
from accounting.errors import PriceError
from accounting.ledger import Ledger
from accounting.options import LedgerOptions
from accounting.prices import Price, PriceBook, Tariff, with_backends
from gateway.config.backends import PriceConfig
from gateway.config.errors import ConfigError
from gateway.config.models import model_of
from gateway.config.price_file import read_price_file
from gateway.config.settings import Settings
from gateway.keys.ceilings import NANOUSD
from gateway.wiring.backends import Engines
from gateway.wiring.foundation import Foundation
from resilience.leg_limits import Cost


@dataclass(frozen=True, slots=True)
class AccountParts:
    """Accounting; ``target_cost`` returns the cost function of a backend as a fallback target or as a shadow;
    ``is_priced``: whether a price covers generations of a backend, given its name and model.
    """

    ledger: Ledger
    accounts: Accounts
    target_cost: Callable[[str], Cost]
    is_priced: Callable[[str, str], bool]
    engine_counts: EngineCounts


def make_accounts(base: Foundation, engines: Engines) -> AccountParts:
    """Build the ledger with its journal, not opened. Raises ConfigError for the price file."""
    section, unix_time = base.settings.ledger, base.unix_time
    prices = make_prices(base.settings)
    ledger = Ledger(
        section.url,
        LedgerOptions(
            emit=base.events.emit,
            clock=base.clock,
            unix_time=unix_time,
            outbox_rows=section.outbox_rows,
            durability=section.durability,
            journal_folder=section.folder,
            journal_bytes=section.journal_max_bytes,
            new_name=lambda: base.new_id(f"{int(unix_time() * 1000):015d}"),
        ),
    )
    return AccountParts(
        ledger,
        Accounts(ledger, prices.priced),
        leg_costs(base.settings, prices, unix_time=unix_time),
        lambda backend, model: prices.may_price(unix_time(), backend, model),
        make_engine_counts(base, engines, ledger),
    )


def make_engine_counts(base: Foundation, engines: Engines, ledger: Ledger) -> EngineCounts:
    """Build the counters of engine tokens; an in-process engine is named by its admission gate."""
    observer = base.new_id("gw")

    def read() -> dict[tuple[str, str], tuple[int, int]]:
        found = {
            (name, url): tokens
            for name, pool in engines.pools.items()
            for url, tokens in pool.counted().items()
        }
        for gate, figures in engines.figures().items():
            if figures is not None and figures.prompt_tokens is not None:
                found[gate, observer] = (figures.prompt_tokens, figures.generation_tokens or 0)
        return found

    begun = [(one.gate, observer) for one in engines.in_process]
    counts = HourlyCounts(observer, begun)
    return EngineCounts(
        counts, read=read, write_lines=ledger.write_counts, unix_time=base.unix_time, clock=base.clock
    )


def make_prices(settings: Settings) -> PriceBook:
    """Return the prices of the price file together with those of the configuration's sections.

    Raises ConfigError if the file cannot be used, or prices a backend that a section prices too.
    """
    path = settings.ledger.prices
    own = {name: price_of(one) for name in settings.backends if (one := settings.price(name)) is not None}
    found = [
        Tariff(price_of(section.price), backend=backend, model=named)
        for name, pool in settings.backends.items()
        if pool.kind == "openai" and pool.model is None and pool.price is None
        for model, section in settings.models.items()
        if section.price is not None and (not section.backends or name in section.backends)
        # The model of an adapter's usage rows is the adapter's id.
        for backend, named in ((name, model), (f"{name}/{model}", None))
    ]
    try:
        book = PriceBook() if path is None else read_price_file(Path(path))
    except PriceError as error:
        raise ConfigError(f"ledger.prices: {error}") from None
    try:
        return with_backends(book, own, version=_name_of(own, found), models=found)
    except PriceError as error:
        raise ConfigError(str(error)) from None


def leg_costs(
    settings: Settings, book: PriceBook, *, unix_time: Callable[[], float]
) -> Callable[[str], Cost]:
    """Return a function from a fallback target to its cost function, by the prices in force at each call.

    The function raises ConfigError for a target with a spending limit but without a price.
    """

    def cost(name: str) -> Cost:
        pool, _, model = name.partition("/")
        if not model and (section := settings.backends.get(pool)) is not None:
            model = model_of(section, settings.engine_sections) or ""

        def price() -> Price | None:
            return book.price(unix_time(), name, model or None)

        if price() is None:
            limit = settings.fallback.limits.get(name)
            if limit is not None and limit.max_spend_usd_per_minute is not None:
                raise ConfigError(
                    f"fallback.limits.{name}.max_spend_usd_per_minute needs a price: "
                    f"set backends.{name}.price, or name the backend or its model in the price file"
                )
        return lambda *tokens: 0 if (now := price()) is None else now.cost_nanousd(*tokens)

    return cost


def price_of(price: PriceConfig) -> Price:
    """Convert a configured price to nano US dollars; cached tokens cost as input tokens by default."""
    cached, written = price.cached_usd_per_million, price.cache_write_usd_per_million
    return Price(
        input_nanousd=round(price.input_usd_per_million * NANOUSD),
        output_nanousd=round(price.output_usd_per_million * NANOUSD),
        cached_nanousd=round((price.input_usd_per_million if cached is None else cached) * NANOUSD),
        cache_write_nanousd=None if written is None else round(written * NANOUSD),
    )


def _name_of(prices: Mapping[str, Price], found: Sequence[Tariff]) -> str:
    """Return a version name that changes with the prices."""
    named = {**prices, **{f"{one.backend}/{one.model}": one.price for one in found}}
    text = ";".join(
        f"{name}={one.input_nanousd},{one.output_nanousd},{one.cached_nanousd}"
        + ("" if one.cache_write_nanousd is None else f",{one.cache_write_nanousd}")
        for name, one in sorted(named.items())
    )
    return f"config-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
