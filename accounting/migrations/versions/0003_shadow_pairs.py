"""Adds the table of shadow pairs."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Create the table ``shadow_pairs``."""
    op.create_table(
        "shadow_pairs",
        sa.Column("pair_id", sa.Text, primary_key=True),
        sa.Column("generation_id", sa.Text, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("route", sa.Text, nullable=False),
        sa.Column("prompt_version", sa.Text),
        sa.Column("adapter_id", sa.Text),
        sa.Column("intent", sa.Text),
        sa.Column("likeness", sa.Double),
        sa.Column("meaning", sa.Double),
        sa.Column("judged", sa.Text),
        sa.Column("primary_side", sa.Text, nullable=False),
        sa.Column("shadow_side", sa.Text, nullable=False),
    )
    op.create_index("ix_shadow_pairs_at", "shadow_pairs", ["at"])
