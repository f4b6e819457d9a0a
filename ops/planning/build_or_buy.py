"""Compares the cost of self-hosting with that of buying tokens, from explicit inputs only.

The defaults are an example with public prices (Qwen2.5-72B in FP8 on two H100 against GPT-4o).
"""

import math
from dataclasses import asdict, dataclass
from typing import Annotated

from typer import Option

HOURS_A_DAY = 24
SECONDS_A_DAY = 86_400
DAYS_A_MONTH = 365.25 / 12
# Figures that must be above 0, and those that must be at most 1.
POSITIVE = frozenset({"gpus", "gpu_usd_per_hour", "tokens_per_second", "utilization", "tokens_per_day"})
SHARES = frozenset({"utilization", "input_share", "cached_share"})


@dataclass(frozen=True, slots=True)
class Build:
    """A self-hosted replica of the model, with the options of `sluice cost`.

    Two H100 are rented for about 7 US dollars an hour.
    """

    gpus: Annotated[int, Option(help="GPUs of one replica.")] = 2
    gpu_usd_per_hour: Annotated[float, Option(help="Price of one GPU.")] = 3.5
    tokens_per_second: Annotated[
        float, Option(help="Tokens that a replica serves within its SLO: measure it with `sluice replay`.")
    ] = 4_000.0
    utilization: Annotated[
        float, Option(help="Mean load of a day, nights included, as a share of --tokens-per-second.")
    ] = 1.0
    usd_per_month: Annotated[float, Option(help="Fixed costs: people, storage, network.")] = 0.0
    spare_replicas: Annotated[int, Option(help="Replicas kept running for updates and a lost node.")] = 0

    @property
    def replica_usd_per_day(self) -> float:
        return self.gpus * self.gpu_usd_per_hour * HOURS_A_DAY

    @property
    def replica_tokens_per_day(self) -> float:
        return self.tokens_per_second * self.utilization * SECONDS_A_DAY

    def replicas(self, tokens_per_day: float) -> int:
        """The number of replicas for a load, spare ones included; at least one."""
        return max(1, math.ceil(tokens_per_day / self.replica_tokens_per_day)) + self.spare_replicas

    def usd_per_day(self, tokens_per_day: float) -> float:
        return self.replicas(tokens_per_day) * self.replica_usd_per_day + self.usd_per_month / DAYS_A_MONTH


@dataclass(frozen=True, slots=True)
class Buy:
    """Bought tokens, with the options of `sluice cost`; prices are US dollars a million."""

    input_usd: Annotated[float, Option(help="Price of a million bought input tokens.")] = 2.5
    output_usd: Annotated[float, Option(help="Price of a million bought output tokens.")] = 10.0
    cached_usd: Annotated[
        float | None, Option(help="Price of a million bought cached input tokens; default: as input.")
    ] = None
    input_share: Annotated[float, Option(help="Share of input in all tokens.")] = 0.75
    cached_share: Annotated[float, Option(help="Share of cached tokens in the input.")] = 0.0

    @property
    def usd_per_million(self) -> float:
        cached_usd = self.input_usd if self.cached_usd is None else self.cached_usd
        of_input = (1 - self.cached_share) * self.input_usd + self.cached_share * cached_usd
        return self.input_share * of_input + (1 - self.input_share) * self.output_usd

    def usd_per_day(self, tokens_per_day: float) -> float:
        return tokens_per_day / 1e6 * self.usd_per_million


@dataclass(frozen=True, slots=True)
class BuildOrBuy:
    """Both costs for one load; ``break_even_tokens_per_day`` is ``None`` if buying is cheaper at any load."""

    tokens_per_day: float
    replicas: int
    build_usd_per_day: float
    buy_usd_per_day: float
    break_even_tokens_per_day: float | None

    @property
    def ratio(self) -> float:
        return self.buy_usd_per_day / self.build_usd_per_day


def compare(build: Build, buy: Buy, tokens_per_day: float | None = None) -> BuildOrBuy:
    """Compare at a load; ``None`` is a full day of one replica. Raises ValueError for an invalid figure."""
    _check(build, buy, tokens_per_day)
    load = build.replica_tokens_per_day if tokens_per_day is None else tokens_per_day
    return BuildOrBuy(
        tokens_per_day=load,
        replicas=build.replicas(load),
        build_usd_per_day=build.usd_per_day(load),
        buy_usd_per_day=buy.usd_per_day(load),
        break_even_tokens_per_day=break_even(build, buy),
    )


def break_even(build: Build, buy: Buy) -> float | None:
    """The lowest load, in tokens per day, at which building costs no more than buying.

    Each further replica is a step in cost, so building may cost more again at a load just above a whole
    number of replicas. ``None`` if even a full replica costs more than its tokens.
    """
    full_tokens = build.replica_tokens_per_day
    margin = buy.usd_per_day(full_tokens) - build.replica_usd_per_day
    if margin <= 0:
        return None
    fixed = build.spare_replicas * build.replica_usd_per_day + build.usd_per_month / DAYS_A_MONTH
    replicas = max(1, math.ceil(fixed / margin))
    tokens = (fixed + replicas * build.replica_usd_per_day) / buy.usd_per_million * 1e6
    # With one replica fewer, building does not pay at any load.
    return max(tokens, (replicas - 1) * full_tokens)


def _check(build: Build, buy: Buy, tokens_per_day: float | None) -> None:
    given = {**asdict(build), **asdict(buy), "tokens_per_day": tokens_per_day}
    for name, value in given.items():
        if value is None:
            continue
        if name in POSITIVE and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name}: given {value}; allowed: above 0")
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{name}: given {value}; allowed: 0 or more")
        if name in SHARES and value > 1:
            raise ValueError(f"{name}: given {value}; allowed: 0 to 1")
