"""The ledger's tables, and the conversion of rows from and to values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Any, get_args, get_type_hints

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    Index,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Dialect
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.dml import Insert

from accounting.values import EngineCount, UsageRow

# Text columns have no length: the API bounds texts, and a bound that is defined in two places drifts apart.
metadata = MetaData()


def columns_of(row: type) -> list[Column[Any]]:
    kinds = {str: Text, int: BigInteger, float: Double, bytes: LargeBinary}
    found: list[Column[Any]] = []
    for name, hint in get_type_hints(row).items():
        options = [one for one in get_args(hint) if isinstance(one, type)] or [hint]
        kind = next((one for one in options if one in kinds), str)
        found.append(Column(name, kinds[kind], nullable=type(None) in options))
    return found


generations = Table(
    "generations",
    metadata,
    *columns_of(UsageRow),
    Column("hour", BigInteger, nullable=False),
    # The primary key of a partitioned table must include the partition column (PostgreSQL, TimescaleDB).
    PrimaryKeyConstraint("generation_id", "hour", name="pk_generations"),
    Index("ix_generations_started_at", "started_at"),
    Index("ix_generations_tenant_started_at", "tenant", "started_at"),
)

# Sums of whole days (since 1970, UTC), grouped by the columns of one of :data:`accounting.day_sums.CUBES`;
# the other columns are null. Triggers insert each day whose rows change into ``open_days``; the sums of such
# a day are missing or out of date.
usage_sums = Table(
    "usage_sums",
    metadata,
    Column("cube", Text, nullable=False),
    Column("day", BigInteger, nullable=False),
    Column("kind", Text, nullable=False),
    *(
        Column(name, Text)
        for name in (
            "tenant",
            "org",
            "user_id",
            "key_id",
            "route",
            "model",
            "adapter_id",
            "backend_name",
        )
    ),
    *(
        Column(name, BigInteger, nullable=False)
        for name in (
            "requests",
            "input_tokens",
            "output_tokens",
            "cached_tokens",
            "cost_nanousd",
            "unpriced_tokens",
            "billed_tokens",
        )
    ),
    Index("ix_usage_sums_cube_day", "cube", "day"),
    Index("ix_usage_sums_day", "day"),
)
open_days = Table("open_days", metadata, Column("day", BigInteger, primary_key=True, autoincrement=False))

# Growth of the engines' own counters by hour; several gateways may observe one engine.
engine_counts = Table(
    "engine_counts",
    metadata,
    *columns_of(EngineCount),
    PrimaryKeyConstraint("hour", "backend", "engine", "observer", name="pk_engine_counts"),
)

_KEY = ("generation_id", "hour")

# The insert by dialect. An existing row stays, so a batch may be written twice; other conflicts are errors.
INSERTS: Mapping[str, Insert] = {
    "sqlite": sqlite.insert(generations).on_conflict_do_nothing(index_elements=_KEY),
    "postgresql": postgresql.insert(generations).on_conflict_do_nothing(index_elements=_KEY),
}


class RowInsert:
    """The insert of one dialect as SQL text; ``values`` returns a row's values in the order of the
    parameters. They go to the driver unchanged: it has a type for every column, and SQLAlchemy's processing
    of each value costs as much as the insert.
    """

    def __init__(self, dialect: Dialect) -> None:
        compiled = INSERTS[dialect.name].compile(dialect=dialect)
        assert isinstance(compiled, SQLCompiler)
        self.sql = str(compiled)
        self.values: Callable[[UsageRow], tuple[Any, ...]] = attrgetter(*(compiled.positiontup or ()))


def counts_upsert(dialect: Dialect, counts: Sequence[EngineCount]) -> Insert:
    """The statement that inserts counts and replaces existing ones."""
    make = postgresql.insert if dialect.name == "postgresql" else sqlite.insert
    insert = make(engine_counts).values([asdict(one) for one in counts])
    newer = {name: insert.excluded[name] for name in ("prompt_tokens", "generation_tokens", "covered_s")}
    return insert.on_conflict_do_update(index_elements=("hour", "backend", "engine", "observer"), set_=newer)
