"""Adds the table of stored responses."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Create the table ``responses``."""
    op.create_table(
        "responses",
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("response_id", sa.Text, nullable=False),
        sa.Column("previous_id", sa.Text),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.Column("alive_until", sa.Double),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("input", sa.LargeBinary, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("events", sa.LargeBinary),
        sa.PrimaryKeyConstraint("tenant", "response_id"),
    )
    op.create_index("ix_responses_alive_until", "responses", ["alive_until"])
    op.create_index("ix_responses_expires_at", "responses", ["expires_at"])
    op.create_index("ix_responses_tenant_created_at", "responses", ["tenant", "created_at"])
