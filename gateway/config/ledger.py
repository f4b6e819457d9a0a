"""The section ``ledger``: where usage rows are stored, and how durable a row is before an answer ends."""

from pathlib import Path
from typing import Annotated

from pydantic import Field
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from accounting.options import Durability
from gateway.config.section import Section
from gateway.config.state import DEFAULT_FILE, STATE_FOLDER

# The default journal folder for a remote database.
DEFAULT_FOLDER = STATE_FOLDER / "ledger.journal"
_IN_MEMORY = (None, "", ":memory:")


class LedgerConfig(Section):
    """Where usage rows are stored; docs/ledger.md explains each key."""

    url: str = f"sqlite+aiosqlite:///{DEFAULT_FILE}"
    outbox_rows: Annotated[int, Field(ge=1, le=10_000_000)] = 10_000
    durability: Durability = Durability.GROUP
    journal_folder: Annotated[str, Field(min_length=1)] | None = None
    journal_max_bytes: Annotated[int, Field(ge=1 << 20, le=1 << 40)] = 1 << 30
    prices: Annotated[str, Field(min_length=1)] | None = None

    @property
    def shown(self) -> str:
        """The url without its password and parameters, which may hold one too."""
        url = self._parsed
        if url is None:
            return "no database url"
        return str(URL.create(url.drivername, url.username, None, url.host, url.port, url.database))

    @property
    def in_memory(self) -> bool:
        """Whether the rows are in an in-memory SQLite database, visible to one connection of this process."""
        url = self._parsed
        return url is not None and url.get_backend_name() == "sqlite" and url.database in _IN_MEMORY

    @property
    def file(self) -> Path | None:
        """The SQLite file; none in memory, by a URI, or of another database."""
        url = self._parsed
        if url is None or url.get_backend_name() != "sqlite" or self.in_memory:
            return None
        return None if str(url.database).startswith("file:") else Path(str(url.database))

    @property
    def folder(self) -> Path | None:
        """The journal's folder, by default next to the SQLite file; none for an in-memory database."""
        if self.durability is Durability.MEMORY:
            return None
        if self.journal_folder is not None:
            return Path(self.journal_folder)
        url = self._parsed
        if url is None:
            return None
        if url.get_backend_name() != "sqlite":
            return DEFAULT_FOLDER
        return None if self.file is None else Path(f"{url.database}.journal")

    @property
    def _parsed(self) -> URL | None:
        try:
            return make_url(self.url)
        except (ArgumentError, ValueError):
            return None  # reported when the ledger opens
