"""The ledger's tables, and the conversion of rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import msgspec
from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    Index,
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

# Texts have no length here: the edge bounds them, and a bound defined in two places drifts apart.
metadata = MetaData()

generations = Table(
    "generations",
    metadata,
    Column("generation_id", Text, nullable=False),
    Column("request_id", Text, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("key_id", Text, nullable=False),
    Column("contract", Text, nullable=False),
    Column("route", Text, nullable=False),
    Column("started_at", Double, nullable=False),
    Column("hour", BigInteger, nullable=False),
    Column("kind", Text, nullable=False),
    Column("org", Text),
    Column("user_id", Text),
    Column("intent", Text),
    Column("session_id", Text),
    Column("adapter_id", Text),
    Column("prompt_version", Text),
    Column("revision", BigInteger),
    Column("backend", Text),
    Column("backend_name", Text),
    Column("backend_version", Text),
    Column("model", Text),
    Column("trace_id", Text),
    Column("finish_reason", Text, nullable=False),
    Column("error_code", Text),
    Column("fallback", Text),
    Column("fallback_reason", Text),
    Column("input_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("billable_input_tokens", BigInteger, nullable=False),
    Column("billable_output_tokens", BigInteger, nullable=False),
    Column("billable_cached_tokens", BigInteger, nullable=False),
    Column("cost_nanousd", BigInteger, nullable=False),
    Column("price_version", Text),
    Column("queue_wait_ms", Double, nullable=False),
    Column("ttft_ms", Double),
    Column("total_ms", Double, nullable=False),
    # What a table is partitioned by stands in its key (PostgreSQL, TimescaleDB); a generation has one hour.
    PrimaryKeyConstraint("generation_id", "hour", name="pk_generations"),
    # reports go by time, and by tenant over a time
    Index("ix_generations_started_at", "started_at"),
    Index("ix_generations_tenant_started_at", "tenant", "started_at"),
)

# What was used on whose engines by the engines' own counters, hour by hour; docs/ledger.md.
engine_counts = Table(
    "engine_counts",
    metadata,
    Column("hour", BigInteger, nullable=False),
    Column("backend", Text, nullable=False),
    # One engine, as all gateways in front of it know it; several may count the same one.
    Column("engine", Text, nullable=False),
    Column("observer", Text, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("generation_tokens", BigInteger, nullable=False),
    Column("covered_s", Double, nullable=False),
    PrimaryKeyConstraint("hour", "backend", "engine", "observer", name="pk_engine_counts"),
)

_FIELDS = tuple(field.name for field in msgspec.structs.fields(UsageRow))
_KEY = ("generation_id", "hour")

# By dialect: a row whose generation is in the table already is left out, so that a batch may be written
# again when nobody knows whether it was. Only that conflict: any other fault of a row still shows.
INSERTS: Mapping[str, Insert] = MappingProxyType(
    {
        "sqlite": sqlite.insert(generations).on_conflict_do_nothing(index_elements=_KEY),
        "postgresql": postgresql.insert(generations).on_conflict_do_nothing(index_elements=_KEY),
    }
)


class RowInsert:
    """The insert for one dialect as SQL text, and a row's values in its order. Values go to the driver as
    they are: every column has a driver's own type, and SQLAlchemy's handling of each value costs as much as
    the insert.
    """

    def __init__(self, dialect: Dialect) -> None:
        compiled = INSERTS[dialect.name].compile(dialect=dialect)
        assert isinstance(compiled, SQLCompiler)
        self.sql = str(compiled)
        self.values: Callable[[UsageRow], tuple[Any, ...]] = attrgetter(*(compiled.positiontup or ()))


def from_columns(columns: Mapping[str, Any]) -> UsageRow:
    """The row of a table's line."""
    return UsageRow(**{name: columns[name] for name in _FIELDS})


def counts_upsert(dialect: Dialect, counts: Sequence[EngineCount]) -> Insert:
    """Inserts counts; existing ones are replaced."""
    make = postgresql.insert if dialect.name == "postgresql" else sqlite.insert
    insert = make(engine_counts).values([asdict(one) for one in counts])
    newer = {name: insert.excluded[name] for name in ("prompt_tokens", "generation_tokens", "covered_s")}
    return insert.on_conflict_do_update(index_elements=("hour", "backend", "engine", "observer"), set_=newer)
