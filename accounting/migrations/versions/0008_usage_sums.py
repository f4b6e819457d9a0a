"""Adds sums of whole days. Triggers add each day whose rows change to ``open_days``, because gateways of the
previous version also write rows, and operators correct rows by hand.
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

_SQLITE = """
CREATE TRIGGER generations_{event}_{row} AFTER {event} ON generations
WHEN {row}.hour / 24 NOT IN (SELECT day FROM open_days)
BEGIN INSERT INTO open_days VALUES ({row}.hour / 24); END
"""
_POSTGRESQL = (
    """
CREATE FUNCTION open_the_day() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  IF TG_OP <> 'DELETE' THEN INSERT INTO open_days VALUES (NEW.hour / 24) ON CONFLICT DO NOTHING; END IF;
  IF TG_OP <> 'INSERT' THEN INSERT INTO open_days VALUES (OLD.hour / 24) ON CONFLICT DO NOTHING; END IF;
  RETURN NULL;
END $$
""",
    """
CREATE FUNCTION no_sums() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  DELETE FROM usage_sums; RETURN NULL;
END $$
""",
    """
CREATE TRIGGER generations_changed AFTER INSERT OR UPDATE OR DELETE ON generations
  FOR EACH ROW EXECUTE FUNCTION open_the_day()
""",
    """
CREATE TRIGGER generations_truncated AFTER TRUNCATE ON generations
  FOR EACH STATEMENT EXECUTE FUNCTION no_sums()
""",
)


def upgrade() -> None:
    """Create the tables and triggers. No day has sums yet; the gateways sum up one day after the other."""
    op.create_table("open_days", sa.Column("day", sa.BigInteger, primary_key=True, autoincrement=False))
    op.create_table(
        "usage_sums",
        sa.Column("cube", sa.Text, nullable=False),
        sa.Column("day", sa.BigInteger, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text),
        sa.Column("org", sa.Text),
        sa.Column("user_id", sa.Text),
        sa.Column("key_id", sa.Text),
        sa.Column("route", sa.Text),
        sa.Column("model", sa.Text),
        sa.Column("adapter_id", sa.Text),
        sa.Column("backend_name", sa.Text),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("input_tokens", sa.BigInteger, nullable=False),
        sa.Column("output_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("cost_nanousd", sa.BigInteger, nullable=False),
        sa.Column("unpriced_tokens", sa.BigInteger, nullable=False),
        sa.Column("billed_tokens", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_usage_sums_cube_day", "usage_sums", ["cube", "day"])
    op.create_index("ix_usage_sums_day", "usage_sums", ["day"])
    op.execute("INSERT INTO open_days SELECT DISTINCT hour / 24 FROM generations")
    changes = (("INSERT", "NEW"), ("UPDATE", "NEW"), ("UPDATE", "OLD"), ("DELETE", "OLD"))
    sqlite = [_SQLITE.format(event=event, row=row) for event, row in changes]
    for statement in _POSTGRESQL if op.get_bind().dialect.name == "postgresql" else sqlite:
        op.execute(statement)
