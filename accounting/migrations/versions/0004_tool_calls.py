"""Adds tool calls and reasoning tokens. Gateways of the previous version rely on the defaults."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add two columns; older rows get 0."""
    for name in ("reasoning_tokens", "tool_calls"):
        op.add_column(
            "generations", sa.Column(name, sa.BigInteger, nullable=False, server_default=sa.text("0"))
        )
