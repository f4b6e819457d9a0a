"""The price file: the versions of the token prices."""

from pathlib import Path
from typing import Annotated

from pydantic import AwareDatetime, Field

from accounting.errors import PriceError
from accounting.prices import TOKENS_PER_PRICE, BookVersion, Price, PriceBook, Tariff
from gateway.config.section import Section
from gateway.config.yaml_file import read_yaml

# 100 dollars per token: the cost of 10 million tokens of each kind still fits into 64 bits.
_Nanousd = Annotated[int, Field(ge=0, le=10**11, strict=True)]
_Name = Annotated[str, Field(min_length=1, max_length=256)]


class TariffEntry(Section):
    """The price of one token in nano US dollars; an unset backend, model or adapter matches any.

    A ``*`` in ``model`` matches any characters.
    """

    backend: _Name | None = None
    model: _Name | None = None
    adapter: _Name | None = None
    input_nanousd: _Nanousd
    output_nanousd: _Nanousd
    cached_nanousd: _Nanousd | None = None
    cache_write_nanousd: _Nanousd | None = None

    def tariff(self) -> Tariff:
        """Return this entry for the price book; cached and written tokens cost as input tokens by default."""
        cached = self.input_nanousd if self.cached_nanousd is None else self.cached_nanousd
        written = self.cache_write_nanousd
        price = Price(
            self.input_nanousd * TOKENS_PER_PRICE,
            self.output_nanousd * TOKENS_PER_PRICE,
            cached * TOKENS_PER_PRICE,
            None if written is None else written * TOKENS_PER_PRICE,
        )
        return Tariff(price, self.backend, self.model, self.adapter)


class VersionEntry(Section):
    """A version of the prices, which applies from ``valid_from`` on."""

    version: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}$")]
    valid_from: AwareDatetime
    prices: Annotated[list[TariffEntry], Field(min_length=1, max_length=10_000)]


class PriceFile(Section):
    """The whole file."""

    versions: Annotated[list[VersionEntry], Field(min_length=1, max_length=1_000)]


def read_price_file(path: Path) -> PriceBook:
    """Read a price file. Raises PriceError, whose message can be printed as it is."""
    file = read_yaml(path, PriceFile, PriceError)
    try:
        return PriceBook(
            [
                BookVersion(one.version, one.valid_from.timestamp(), tuple(e.tariff() for e in one.prices))
                for one in file.versions
            ]
        )
    except PriceError as error:
        raise PriceError(f"{path}: {error}") from None
