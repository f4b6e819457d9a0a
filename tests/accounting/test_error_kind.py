"""What logs and answers say about a failed write."""

import sqlite3

import pytest
from asyncpg.exceptions import ReadOnlySQLTransactionError
from sqlalchemy.dialects.postgresql.asyncpg import AsyncAdapt_asyncpg_dbapi
from sqlalchemy.exc import DBAPIError, OperationalError

from accounting.events import error_kind


def test_an_error_of_postgresql_is_named_by_the_servers_class() -> None:
    with pytest.raises(AsyncAdapt_asyncpg_dbapi.Error) as caught:
        raise AsyncAdapt_asyncpg_dbapi.Error("INSERT … secret") from ReadOnlySQLTransactionError("secret")
    assert error_kind(DBAPIError("INSERT", None, caught.value)) == "ReadOnlySQLTransactionError"


def test_an_error_of_sqlite_or_of_the_system_is_named_by_its_class_and_cause() -> None:
    locked = sqlite3.OperationalError("database is locked")
    locked.sqlite_errorname = "SQLITE_BUSY"
    assert error_kind(OperationalError("INSERT", None, locked)) == "OperationalError SQLITE_BUSY"
    assert error_kind(OSError(28, "secret")) == "OSError ENOSPC"
