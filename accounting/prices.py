"""The price book: versions with dates; prices are whole nano US dollars (10⁻⁹)."""

import bisect
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import msgspec

from accounting.errors import PriceError
from accounting.values import UsageRow

TOKENS_PER_PRICE = 1_000_000
MAX_CACHED = 4_096  # most cached results of tariff searches in a version; each takes some 200 bytes


@dataclass(frozen=True, slots=True)
class Price:
    """The price of a million tokens, nano US dollars; tokens written to a cache may cost more than others."""

    input_nanousd: int
    output_nanousd: int
    cached_nanousd: int
    cache_write_nanousd: int | None = None

    def cost_nanousd(
        self, input_tokens: int, output_tokens: int, cached_tokens: int, cache_write_tokens: int = 0
    ) -> int:
        """The cost of these tokens, rounded up; cached tokens and written ones are parts of the input."""
        cached = min(cached_tokens, input_tokens)
        written = 0 if self.cache_write_nanousd is None else min(cache_write_tokens, input_tokens - cached)
        total = (
            (input_tokens - cached - written) * self.input_nanousd
            + cached * self.cached_nanousd
            + written * (self.cache_write_nanousd or 0)
            + output_tokens * self.output_nanousd
        )
        return -(-total // TOKENS_PER_PRICE)


@dataclass(frozen=True, slots=True)
class Tariff:
    """A price and the generations that it covers; ``None`` matches any value.

    ``model`` may be a pattern with ``*``. A backend ``pool/model`` is a model of a pool; a tariff of the pool
    covers it too.
    """

    price: Price
    backend: str | None = None
    model: str | None = None
    adapter: str | None = None

    @property
    def specificity(self) -> tuple[bool, int, int]:
        """Sort key; the highest one wins: the adapter decides before the model, the model before the backend.

        A model beats a pattern, a longer pattern beats a shorter one, ``pool/model`` beats ``pool``.
        """
        model, backend = self.model, self.backend
        of_model = 0 if model is None else len(model) if "*" in model else sys.maxsize
        of_backend = 0 if backend is None else 1 + ("/" in backend)
        return (self.adapter is not None, of_model, of_backend)

    def covers(self, backend: str | None, model: str | None, adapter: str | None) -> bool:
        return (
            self.backend in (None, backend, None if backend is None else backend.partition("/")[0])
            and (self.model in (None, model) or _like(self.model, model))
            and self.adapter in (None, adapter)
        )


def _like(pattern: str | None, model: str | None) -> bool:
    if pattern is None or model is None or "*" not in pattern:
        return False
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), model, re.DOTALL) is not None


@dataclass(frozen=True, slots=True)
class BookVersion:
    """The tariffs in force from ``valid_from`` (Unix seconds) until the next version's."""

    version: str
    valid_from: float
    tariffs: tuple[Tariff, ...]

    def tariff(self, backend: str | None, model: str | None, adapter: str | None) -> Tariff | None:
        """The most specific tariff that covers such a generation; ``None`` without one."""
        fitting = (one for one in self.tariffs if one.covers(backend, model, adapter))
        return max(fitting, key=lambda one: one.specificity, default=None)


class PriceBook:
    """All versions, oldest first. Rows name their version, so a version never changes: a new one replaces it.
    Raises PriceError when two versions have one name or one start, or two tariffs cover the same.
    """

    def __init__(self, versions: Sequence[BookVersion] = ()) -> None:
        self.versions = tuple(sorted(versions, key=lambda one: one.valid_from))
        self._starts = [one.valid_from for one in self.versions]
        if len({one.version for one in versions}) < len(versions) or len(set(self._starts)) < len(versions):
            raise PriceError(
                "versions: two have the same name or the same valid_from; allowed: different ones"
            )
        for version in self.versions:
            known: set[tuple[str | None, str | None, str | None]] = set()
            for one in version.tariffs:
                key = (one.backend, one.model, one.adapter)
                if key in known:
                    raise PriceError(
                        f"version {version.version!r}: {_words(one)} has two prices; allowed: one"
                    )
                known.add(key)
        self._tariff_in = {one.version: lru_cache(MAX_CACHED)(one.tariff) for one in versions}

    def at(self, unix_s: float) -> BookVersion | None:
        """The version in force at that time; ``None`` before the first."""
        place = bisect.bisect_right(self._starts, unix_s)
        return self.versions[place - 1] if place else None

    def price(
        self, unix_s: float, backend: str, model: str | None = None, adapter: str | None = None
    ) -> Price | None:
        """The price of such a generation; ``None`` if no tariff covers it."""
        version = self.at(unix_s)
        tariff = None if version is None else version.tariff(backend, model, adapter)
        return None if tariff is None else tariff.price

    def may_price(self, unix_s: float, backend: str, model: str) -> bool:
        """Whether a tariff covers generations of such a backend, if only those with some adapter. An empty
        ``model`` is one that is not known yet.
        """
        version = self.at(unix_s)
        tariffs = () if version is None else version.tariffs
        return any(one.covers(backend, model or one.model, one.adapter) for one in tariffs)

    def priced(self, row: UsageRow) -> UsageRow:
        """The row with its cost, by the version in force when the generation started.

        Rows without tokens cost nothing. A row that no tariff covers costs nothing and names no version,
        which tells it from a row whose tariff is free.
        """
        version = self.at(row.started_at)
        if version is None or not (row.input_tokens or row.output_tokens):
            return row
        tariff = self._tariff_in[version.version](row.backend_name, row.model, row.adapter_id)
        if tariff is None:
            return row
        cost = tariff.price.cost_nanousd(
            row.input_tokens, row.output_tokens, row.cached_tokens, row.cache_write_tokens
        )
        return msgspec.structs.replace(row, cost_nanousd=cost, price_version=version.version)


def with_backends(
    book: PriceBook, backends: Mapping[str, Price], *, version: str, models: Sequence[Tariff] = ()
) -> PriceBook:
    """The book with two kinds of prices added to each version: those in the ``backends`` sections, and those
    of ``models`` that pools may serve. Before the first version of the file a version named ``version`` has
    only these. Raises PriceError when a backend has a price in both places.
    """
    if not backends and not models:
        return book
    own = (*(Tariff(price, backend=name) for name, price in sorted(backends.items())), *models)
    for one in book.versions:
        for tariff in one.tariffs:
            if tariff.backend in backends and tariff.model is None and tariff.adapter is None:
                raise PriceError(
                    f"backend {tariff.backend!r} has a price in version {one.version!r} of the price "
                    f"file and in backends.{tariff.backend}.price; allowed: one of them"
                )
    versions = [replace(one, tariffs=(*one.tariffs, *own)) for one in book.versions]
    if not versions or versions[0].valid_from > 0:
        versions.insert(0, BookVersion(version, 0.0, own))
    return PriceBook(versions)


def _words(tariff: Tariff) -> str:
    named = {"backend": tariff.backend, "model": tariff.model, "adapter": tariff.adapter}
    return ", ".join(f"{name} {value!r}" for name, value in named.items() if value is not None) or "the rest"
