"""Adds tokens written to a prompt cache. Gateways of the previous version rely on the default."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Add a column; older rows get 0."""
    column = sa.Column("cache_write_tokens", sa.BigInteger, nullable=False, server_default=sa.text("0"))
    op.add_column("generations", column)
