"""Alembic's entry; ``accounting.store_schema`` gives it a connection with an open transaction."""

from alembic import context

from accounting.tables import metadata

# A table of its own, because the state store may live in the same file.
VERSION_TABLE = "ledger_version"

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
)
context.run_migrations()
