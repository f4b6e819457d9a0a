"""Tool calls and tokens of reasoning. The defaults are for gateways of the version before."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Two columns; older rows had neither."""
    for name in ("reasoning_tokens", "tool_calls"):
        op.add_column(
            "generations", sa.Column(name, sa.BigInteger, nullable=False, server_default=sa.text("0"))
        )
