"""The ledger's table, and how rows go in and come out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from sqlalchemy import BigInteger, Column, Double, Index, MetaData, RowMapping, Table, Text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Dialect
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.dml import Insert

from accounting.values import UsageRow

# Texts have no length here: their bounds are the edge's, and a bound that two places know drifts apart.
generations = Table(
    "generations",
    MetaData(),
    Column("generation_id", Text, primary_key=True),
    Column("request_id", Text, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("key_id", Text, nullable=False),
    Column("contract", Text, nullable=False),
    Column("route", Text, nullable=False),
    Column("started_at", Double, nullable=False),
    Column("intent", Text),
    Column("session_id", Text),
    Column("adapter_id", Text),
    Column("prompt_version", Text),
    Column("revision", BigInteger),
    Column("backend", Text),
    Column("backend_name", Text),
    Column("backend_version", Text),
    Column("trace_id", Text),
    Column("finish_reason", Text, nullable=False),
    Column("error_code", Text),
    Column("fallback", Text),
    Column("fallback_reason", Text),
    Column("input_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("queue_wait_ms", Double, nullable=False),
    Column("ttft_ms", Double),
    Column("total_ms", Double, nullable=False),
    # reports go by time, and by tenant over a time
    Index("ix_generations_started_at", "started_at"),
    Index("ix_generations_tenant_started_at", "tenant", "started_at"),
)

_FIELDS = tuple(field.name for field in fields(UsageRow))

# By dialect: a row whose generation is in the table already is left out, so that a batch may be written
# again when nobody knows whether it was. Only that conflict: any other fault of a row still shows.
INSERTS: Mapping[str, Insert] = MappingProxyType(
    {
        "sqlite": sqlite.insert(generations).on_conflict_do_nothing(index_elements=["generation_id"]),
        "postgresql": postgresql.insert(generations).on_conflict_do_nothing(index_elements=["generation_id"]),
    }
)


class RowInsert:
    """The insert for one dialect, ready for the driver: SQL text, and a row's values in its order.

    Rows go to the driver as they are. Every column has a driver's own type, so there is nothing that
    SQLAlchemy's handling of each value, which costs as much as the insert, would have to convert.
    """

    def __init__(self, dialect: Dialect) -> None:
        compiled = INSERTS[dialect.name].compile(dialect=dialect)
        assert isinstance(compiled, SQLCompiler)
        self.sql = str(compiled)
        self.values: Callable[[UsageRow], tuple[Any, ...]] = attrgetter(*(compiled.positiontup or ()))


def from_columns(columns: RowMapping) -> UsageRow:
    """The row of a table's line."""
    return UsageRow(**{name: columns[name] for name in _FIELDS})
