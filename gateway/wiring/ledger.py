"""The part of the composition root that makes the ledger and the price book."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from accounting.engine_counts import EngineCounts, HourlyCounts
from accounting.errors import PriceError
from accounting.events import LedgerEvent
from accounting.ledger import Ledger
from accounting.prices import Price, PriceBook, with_backends
from gateway.backends.workers.backend import WorkersBackend
from gateway.config.errors import ConfigError
from gateway.config.price_file import read_price_file
from gateway.config.settings import Settings
from gateway.wiring.backends import Engines
from gateway.wiring.cache import price_of
from resilience.leg_limits import FREE
from resilience.leg_limits import LegPrice as LegPrice


def make_ledger(
    settings: Settings,
    *,
    emit: Callable[[LedgerEvent], None],
    clock: Callable[[], float],
    unix_time: Callable[[], float],
    new_id: Callable[[str], str],
) -> Ledger:
    """Construct the ledger with its journal; nothing is opened yet."""
    section = settings.ledger
    return Ledger(
        section.url,
        emit=emit,
        clock=clock,
        unix_time=unix_time,
        outbox_rows=section.outbox_rows,
        durability=section.durability,
        journal_folder=section.folder,
        journal_bytes=section.journal_max_bytes,
        new_name=lambda: new_id(f"{int(unix_time() * 1000):015d}"),
    )


def make_engine_counts(
    engines: Engines, ledger: Ledger, *, observer: str, unix_time: Callable[[], float]
) -> EngineCounts:
    """What keeps the engines' own counters beside the ledger.

    The engine in process goes by the first of its backends' names.
    """
    here = (min(engines.on_engine, default=""), observer)

    def read() -> dict[tuple[str, str], tuple[int, int]]:
        found = {
            (name, url): tokens
            for name, one in engines.backends.items()
            if isinstance(one, WorkersBackend)
            for url, tokens in one.counted().items()
        }
        figures = None if engines.host is None else engines.host.figures()
        if figures is not None and figures.prompt_tokens is not None:
            found[here] = (figures.prompt_tokens, figures.generation_tokens or 0)
        return found

    begun = [here] if engines.host is not None else []
    return EngineCounts(
        HourlyCounts(observer, begun), read=read, write=ledger.keep_counts, unix_time=unix_time
    )


def make_prices(settings: Settings) -> PriceBook:
    """The price file together with the prices of the backends' own sections.

    Raises:
        ConfigError: the file cannot be used, or says the same as a section.
    """
    path = settings.ledger.prices
    own: dict[str, Price] = {}
    for name, backend in settings.backends.items():
        if backend.price is not None:
            price = price_of(backend)
            own[name] = Price(price.input_nanousd, price.output_nanousd, price.cached_nanousd)
    try:
        book = PriceBook() if path is None else read_price_file(Path(path))
        return with_backends(book, own, version=_name_of(own))
    except PriceError as error:
        raise ConfigError(str(error)) from None


def leg_prices(
    settings: Settings, book: PriceBook, *, unix_time: Callable[[], float]
) -> Callable[[str], LegPrice]:
    """What a leg costs, by the same book that rows are priced by; as it stands at the start.

    Raises:
        ConfigError: a leg's spending has a limit, but nobody says what it costs.
    """
    now = unix_time()

    def price(name: str) -> LegPrice:
        found = book.price(now, name)
        if found is None:
            limit = settings.fallback.limits.get(name)
            if limit is not None and limit.max_spend_usd_per_minute is not None:
                raise ConfigError(
                    f"fallback.limits.{name}.max_spend_usd_per_minute needs a price: "
                    f"set backends.{name}.price, or name the backend in the price file"
                )
            return FREE
        return LegPrice(found.input_nanousd, found.output_nanousd, found.cached_nanousd)

    return price


def _name_of(prices: Mapping[str, Price]) -> str:
    """A name for what the sections say that changes with it."""
    said = ";".join(
        f"{name}={one.input_nanousd},{one.output_nanousd},{one.cached_nanousd}"
        for name, one in sorted(prices.items())
    )
    return f"config-{hashlib.sha256(said.encode()).hexdigest()[:8]}"
