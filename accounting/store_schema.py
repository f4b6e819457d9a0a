"""Migrates the ledger's tables; only once, even when several processes start together."""

from collections.abc import Sequence
from typing import Final

from sqlalchemy import Connection, inspect, text
from sqlalchemy.ext.asyncio import AsyncEngine

# The last revision in accounting/migrations/versions; a test compares them.
HEAD: Final = "0001"
VERSIONS: Final = "accounting:migrations/versions"
# Key of the lock during the migration: any number that no other program uses in this database.
ADVISORY_LOCK: Final = 0x51_75_1C_E0


async def bring_up(engine: AsyncEngine, *, head: str = HEAD, versions: Sequence[str] = (VERSIONS,)) -> None:
    """Run the missing migrations of the folders ``versions``, in one transaction under a lock. A schema newer
    than ``head`` is left unchanged: migrations only add, so an older gateway can still write.
    """
    async with engine.connect() as connection:
        if await connection.run_sync(_version) >= head:
            return
    async with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            # The driver would begin a transaction only at the first DML statement, not for DDL.
            await connection.exec_driver_sql("BEGIN IMMEDIATE")
        else:
            await connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": ADVISORY_LOCK})
        await connection.run_sync(_upgrade, versions)
        await connection.commit()


def _version(connection: Connection) -> str:
    if not inspect(connection).has_table("ledger_version"):
        return ""
    return str(connection.exec_driver_sql("SELECT version_num FROM ledger_version").scalar() or "")


def _upgrade(connection: Connection, versions: Sequence[str] = (VERSIONS,)) -> None:
    # Alembic is needed once in a ledger's life and costs 0.12 s to import.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "accounting:migrations")
    config.set_main_option("path_separator", "newline")
    config.set_main_option("version_locations", "\n".join(versions))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
