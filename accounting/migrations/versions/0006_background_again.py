"""Adds the data to run a background response again after its gateway has died."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Add the column ``again``; older rows cannot be run again."""
    op.add_column("responses", sa.Column("again", sa.LargeBinary))
