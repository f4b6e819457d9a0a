"""Alembic's entry point; ``accounting.store_schema`` passes a connection with an open transaction."""

from alembic import context

from accounting.tables import metadata

# Not Alembic's default table: the state store may use the same database file.
VERSION_TABLE = "ledger_version"

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
)
context.run_migrations()
