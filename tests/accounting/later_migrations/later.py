"""The further revision of a later version: a column that gateways of this version do not write."""

import sqlalchemy as sa
from alembic import op

revision = "later"
down_revision = "0001"


def upgrade() -> None:
    """Add a column; older rows get 0."""
    op.add_column(
        "generations", sa.Column("added", sa.BigInteger, nullable=False, server_default=sa.text("0"))
    )
