"""All tables of version 0.1.0, in the SQL of SQLite; PostgreSQL has other names of two types."""

from alembic import op

revision = "0001"
down_revision = None

# A test compares the tables with those that the code knows.
_TABLES = """
CREATE TABLE generations (
  generation_id TEXT NOT NULL, hour BIGINT NOT NULL, request_id TEXT NOT NULL, tenant TEXT NOT NULL,
  key_id TEXT NOT NULL, contract TEXT NOT NULL, route TEXT NOT NULL, started_at DOUBLE NOT NULL,
  kind TEXT NOT NULL, org TEXT, user_id TEXT, intent TEXT, session_id TEXT, adapter_id TEXT,
  prompt_version TEXT, revision BIGINT, backend TEXT, backend_name TEXT, backend_version TEXT, model TEXT,
  trace_id TEXT, finish_reason TEXT NOT NULL, error_code TEXT, fallback TEXT, fallback_reason TEXT,
  input_tokens BIGINT NOT NULL, output_tokens BIGINT NOT NULL, cached_tokens BIGINT NOT NULL,
  reasoning_tokens BIGINT NOT NULL, cache_write_tokens BIGINT NOT NULL, tool_calls BIGINT NOT NULL,
  billable_input_tokens BIGINT NOT NULL, billable_output_tokens BIGINT NOT NULL,
  billable_cached_tokens BIGINT NOT NULL, cost_nanousd BIGINT NOT NULL, price_version TEXT,
  queue_wait_ms DOUBLE NOT NULL, ttft_ms DOUBLE, total_ms DOUBLE NOT NULL,
  CONSTRAINT pk_generations PRIMARY KEY (generation_id, hour)
);
CREATE TABLE engine_counts (
  hour BIGINT NOT NULL, backend TEXT NOT NULL, engine TEXT NOT NULL, observer TEXT NOT NULL,
  prompt_tokens BIGINT NOT NULL, generation_tokens BIGINT NOT NULL, covered_s DOUBLE NOT NULL,
  CONSTRAINT pk_engine_counts PRIMARY KEY (hour, backend, engine, observer)
);
CREATE TABLE shadow_pairs (
  pair_id TEXT NOT NULL PRIMARY KEY, generation_id TEXT NOT NULL, at DOUBLE NOT NULL,
  route TEXT NOT NULL, prompt_version TEXT, adapter_id TEXT, intent TEXT, likeness DOUBLE,
  judged TEXT, primary_side TEXT NOT NULL, shadow_side TEXT NOT NULL
);
CREATE TABLE responses (
  tenant TEXT NOT NULL, response_id TEXT NOT NULL, previous_id TEXT, status TEXT NOT NULL,
  created_at DOUBLE NOT NULL, expires_at DOUBLE NOT NULL, alive_until DOUBLE,
  size BIGINT NOT NULL, input BLOB NOT NULL, body BLOB NOT NULL, events BLOB, again BLOB,
  PRIMARY KEY (tenant, response_id)
);
CREATE TABLE files (
  file_id TEXT NOT NULL PRIMARY KEY, tenant TEXT NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL,
  bytes BIGINT NOT NULL, created_at DOUBLE NOT NULL, expires_at DOUBLE
);
CREATE TABLE batches (
  batch_id TEXT NOT NULL PRIMARY KEY, tenant TEXT NOT NULL, key_id TEXT NOT NULL, own_salt TEXT,
  endpoint TEXT NOT NULL, input_file_id TEXT NOT NULL, status TEXT NOT NULL, ending TEXT,
  created_at DOUBLE NOT NULL, expires_at DOUBLE NOT NULL, total BIGINT NOT NULL,
  body BLOB NOT NULL, owner TEXT, lease_until DOUBLE
);
CREATE TABLE batch_lines (
  batch_id TEXT NOT NULL, place BIGINT NOT NULL, number BIGINT NOT NULL, custom_id TEXT NOT NULL,
  start BIGINT NOT NULL, size BIGINT NOT NULL, status TEXT NOT NULL, owner TEXT,
  lease_until DOUBLE, takeovers BIGINT NOT NULL, failures BIGINT NOT NULL, output BLOB,
  input_tokens BIGINT NOT NULL, cached_tokens BIGINT NOT NULL, output_tokens BIGINT NOT NULL,
  reasoning_tokens BIGINT NOT NULL, PRIMARY KEY (batch_id, place)
);
CREATE TABLE open_days (day BIGINT NOT NULL PRIMARY KEY);
CREATE TABLE usage_sums (
  cube TEXT NOT NULL, day BIGINT NOT NULL, kind TEXT NOT NULL, tenant TEXT, org TEXT, user_id TEXT,
  key_id TEXT, route TEXT, model TEXT, adapter_id TEXT, backend_name TEXT, requests BIGINT NOT NULL,
  input_tokens BIGINT NOT NULL, output_tokens BIGINT NOT NULL, cached_tokens BIGINT NOT NULL,
  cost_nanousd BIGINT NOT NULL, unpriced_tokens BIGINT NOT NULL, billed_tokens BIGINT NOT NULL
)
"""
_INDICES = (
    ("generations", "started_at"),
    ("generations", "tenant", "started_at"),
    ("shadow_pairs", "at"),
    ("responses", "alive_until"),
    ("responses", "expires_at"),
    ("responses", "tenant", "created_at"),
    ("files", "tenant", "created_at"),
    ("files", "expires_at"),
    ("batches", "tenant", "created_at"),
    ("batches", "status"),
    ("batch_lines", "batch_id", "status", "place"),
    ("batch_lines", "owner"),
    ("usage_sums", "cube", "day"),
    ("usage_sums", "day"),
)
# Each day whose rows change is added to ``open_days`` by triggers, since operators correct rows by hand.
_SQLITE_TRIGGER = """
CREATE TRIGGER generations_{event}_{row} AFTER {event} ON generations
WHEN {row}.hour / 24 NOT IN (SELECT day FROM open_days)
BEGIN INSERT INTO open_days VALUES ({row}.hour / 24); END
"""
_CHANGES = (("INSERT", "NEW"), ("UPDATE", "NEW"), ("UPDATE", "OLD"), ("DELETE", "OLD"))
_POSTGRESQL_TRIGGERS = (
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
    """Create the tables, indices and triggers."""
    is_postgresql = op.get_bind().dialect.name == "postgresql"
    tables = _TABLES.replace("DOUBLE", "DOUBLE PRECISION").replace("BLOB", "BYTEA")
    for table in (tables if is_postgresql else _TABLES).split(";"):
        op.execute(table)
    for table, *columns in _INDICES:
        op.create_index("_".join(("ix", table, *columns)), table, columns)
    triggers = [_SQLITE_TRIGGER.format(event=event, row=row) for event, row in _CHANGES]
    for trigger in _POSTGRESQL_TRIGGERS if is_postgresql else triggers:
        op.execute(trigger)
