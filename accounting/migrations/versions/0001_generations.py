"""The table as it was before there were migrations; an existing one is kept."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the table if it does not exist."""
    op.create_table(
        "generations",
        sa.Column("generation_id", sa.Text, primary_key=True),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("contract", sa.Text, nullable=False),
        sa.Column("route", sa.Text, nullable=False),
        sa.Column("started_at", sa.Double, nullable=False),
        sa.Column("intent", sa.Text),
        sa.Column("session_id", sa.Text),
        sa.Column("adapter_id", sa.Text),
        sa.Column("prompt_version", sa.Text),
        sa.Column("revision", sa.BigInteger),
        sa.Column("backend", sa.Text),
        sa.Column("backend_name", sa.Text),
        sa.Column("backend_version", sa.Text),
        sa.Column("trace_id", sa.Text),
        sa.Column("finish_reason", sa.Text, nullable=False),
        sa.Column("error_code", sa.Text),
        sa.Column("fallback", sa.Text),
        sa.Column("fallback_reason", sa.Text),
        sa.Column("input_tokens", sa.BigInteger, nullable=False),
        sa.Column("output_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("queue_wait_ms", sa.Double, nullable=False),
        sa.Column("ttft_ms", sa.Double),
        sa.Column("total_ms", sa.Double, nullable=False),
        if_not_exists=True,
    )
    op.create_index("ix_generations_started_at", "generations", ["started_at"], if_not_exists=True)
    op.create_index(
        "ix_generations_tenant_started_at", "generations", ["tenant", "started_at"], if_not_exists=True
    )
