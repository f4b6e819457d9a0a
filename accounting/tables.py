"""The ledger's tables, and the conversion of rows from and to values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from operator import attrgetter
from typing import Any, TypeVar, cast, get_args, get_type_hints

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Dialect
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.dml import Insert

from accounting.values import EngineCount, UsageRow

V = TypeVar("V")

# Text columns have no length: the API bounds texts, and a bound that is defined in two places drifts apart.
metadata = sa.MetaData()


def columns_of(row: type) -> list[sa.Column[Any]]:
    kinds = {str: sa.Text, int: sa.BigInteger, float: sa.Double, bytes: sa.LargeBinary}
    found: list[sa.Column[Any]] = []
    for name, hint in get_type_hints(row).items():
        options = [one for one in get_args(hint) if isinstance(one, type)] or [hint]
        kind = next((one for one in options if one in kinds), str)
        found.append(sa.Column(name, kinds[kind], nullable=type(None) in options))
    return found


generations = sa.Table(
    "generations",
    metadata,
    *columns_of(UsageRow),
    sa.Column("hour", sa.BigInteger, nullable=False),
    # The primary key of a partitioned table must include the partition column (PostgreSQL, TimescaleDB).
    sa.PrimaryKeyConstraint("generation_id", "hour", name="pk_generations"),
    sa.Index("ix_generations_started_at", "started_at"),
    sa.Index("ix_generations_tenant_started_at", "tenant", "started_at"),
)

# Growth of the engines' own counters by hour; several gateways may observe one engine.
engine_counts = sa.Table(
    "engine_counts",
    metadata,
    *columns_of(EngineCount),
    sa.PrimaryKeyConstraint("hour", "backend", "engine", "observer", name="pk_engine_counts"),
)


def value_of(row: sa.RowMapping | Mapping[str, Any], kind: type[V]) -> V:
    """The value of a dataclass ``kind`` in a row that may have fewer or further columns."""
    names = [one.name for one in fields(cast("Any", kind))]
    return kind(**{name: row[name] for name in names if name in row})


def insert_into(table: sa.Table, dialect: Dialect) -> sqlite.Insert | postgresql.Insert:
    """The dialect's own insert, which has ``ON CONFLICT``."""
    return postgresql.insert(table) if dialect.name == "postgresql" else sqlite.insert(table)


class RowInsert:
    """The insert of one dialect as SQL text; ``values`` returns a row's values in the order of the
    parameters. They go to the driver unchanged: it has a type for every column, and SQLAlchemy's processing
    of each value costs as much as the insert.

    An existing row stays, so a batch may be written twice; other conflicts are errors.
    """

    def __init__(self, dialect: Dialect) -> None:
        insert = insert_into(generations, dialect)
        insert = insert.on_conflict_do_nothing(index_elements=("generation_id", "hour"))
        compiled = insert.compile(dialect=dialect)
        assert isinstance(compiled, SQLCompiler)
        self.sql = str(compiled)
        self.values: Callable[[UsageRow], tuple[Any, ...]] = attrgetter(*(compiled.positiontup or ()))


def counts_upsert(dialect: Dialect, counts: Sequence[EngineCount]) -> Insert:
    """The statement that inserts counts and replaces existing ones."""
    insert = insert_into(engine_counts, dialect).values([asdict(one) for one in counts])
    newer = {name: insert.excluded[name] for name in ("prompt_tokens", "generation_tokens", "covered_s")}
    return insert.on_conflict_do_update(index_elements=("hour", "backend", "engine", "observer"), set_=newer)
