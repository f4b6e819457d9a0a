"""Adds kind, org, user, model, billable tokens, cost, a primary key for partitions, and ``engine_counts``.

SQLite cannot change a primary key, so the rows are copied into a new table, in one transaction.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_KEPT = (
    "generation_id, request_id, tenant, key_id, contract, route, started_at, intent, session_id, adapter_id, "
    "prompt_version, revision, backend, backend_name, backend_version, trace_id, finish_reason, error_code, "
    "fallback, fallback_reason, input_tokens, output_tokens, cached_tokens, queue_wait_ms, ttft_ms, total_ms"
)


def upgrade() -> None:
    """Old rows: the billable tokens are the counted ones; the cost is 0, because it is not known."""
    op.drop_index("ix_generations_started_at", "generations")
    op.drop_index("ix_generations_tenant_started_at", "generations")
    op.rename_table("generations", "generations_0001")
    op.create_table(
        "generations",
        sa.Column("generation_id", sa.Text, nullable=False),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("contract", sa.Text, nullable=False),
        sa.Column("route", sa.Text, nullable=False),
        sa.Column("started_at", sa.Double, nullable=False),
        sa.Column("hour", sa.BigInteger, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("org", sa.Text),
        sa.Column("user_id", sa.Text),
        sa.Column("intent", sa.Text),
        sa.Column("session_id", sa.Text),
        sa.Column("adapter_id", sa.Text),
        sa.Column("prompt_version", sa.Text),
        sa.Column("revision", sa.BigInteger),
        sa.Column("backend", sa.Text),
        sa.Column("backend_name", sa.Text),
        sa.Column("backend_version", sa.Text),
        sa.Column("model", sa.Text),
        sa.Column("trace_id", sa.Text),
        sa.Column("finish_reason", sa.Text, nullable=False),
        sa.Column("error_code", sa.Text),
        sa.Column("fallback", sa.Text),
        sa.Column("fallback_reason", sa.Text),
        sa.Column("input_tokens", sa.BigInteger, nullable=False),
        sa.Column("output_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("billable_input_tokens", sa.BigInteger, nullable=False),
        sa.Column("billable_output_tokens", sa.BigInteger, nullable=False),
        sa.Column("billable_cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("cost_nanousd", sa.BigInteger, nullable=False),
        sa.Column("price_version", sa.Text),
        sa.Column("queue_wait_ms", sa.Double, nullable=False),
        sa.Column("ttft_ms", sa.Double),
        sa.Column("total_ms", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("generation_id", "hour", name="pk_generations"),
    )
    # A cast to an integer rounds in PostgreSQL and truncates in SQLite.
    floored = "FLOOR(started_at / 3600)" if _is_postgresql() else "started_at / 3600"
    op.execute(
        f"INSERT INTO generations ({_KEPT}, hour, kind, billable_input_tokens, billable_output_tokens, "
        f"billable_cached_tokens, cost_nanousd) SELECT {_KEPT}, CAST({floored} AS BIGINT), 'request', "
        "input_tokens, output_tokens, cached_tokens, 0 FROM generations_0001"
    )
    op.drop_table("generations_0001")
    op.create_index("ix_generations_started_at", "generations", ["started_at"])
    op.create_index("ix_generations_tenant_started_at", "generations", ["tenant", "started_at"])
    op.create_table(
        "engine_counts",
        sa.Column("hour", sa.BigInteger, nullable=False),
        sa.Column("backend", sa.Text, nullable=False),
        sa.Column("engine", sa.Text, nullable=False),
        sa.Column("observer", sa.Text, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("generation_tokens", sa.BigInteger, nullable=False),
        sa.Column("covered_s", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("hour", "backend", "engine", "observer", name="pk_engine_counts"),
    )


def _is_postgresql() -> bool:
    return op.get_bind().dialect.name == "postgresql"
