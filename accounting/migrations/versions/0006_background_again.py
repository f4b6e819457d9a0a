"""What a background response is run again by when its gateway has died."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """A column; older rows cannot be run again."""
    op.add_column("responses", sa.Column("again", sa.LargeBinary))
