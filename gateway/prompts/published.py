"""Keeps what was published under each prompt version's id, so that a published text never changes unseen.

The first start that meets an id publishes it: its hash goes into the state store and stays, also when the
file goes away. A start that finds another text under a published id is refused.

When the state store cannot be reached at the start, the gateway starts without this check, and says so: an
operator who has changed no prompt must not be kept from starting by a broken disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

import structlog
from sqlalchemy import Column, Connection, Float, MetaData, String, Table, create_engine, event, func, select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool
from sqlalchemy.schema import CreateTable

from gateway.prompts.versions import PromptFileError, PromptVersions

# Longest wait for another process that writes.
BUSY_TIMEOUT_MS = 2_000
# Ids that one state store keeps; publishing is done by people.
MAX_PUBLISHED = 100_000

_PUBLISHED = Table(
    "published_prompts",
    MetaData(),
    Column("id", String(128), primary_key=True),
    Column("sha256", String(64), nullable=False),
    Column("published_at", Float, nullable=False),
)


class PromptChanged(PromptFileError):
    """A published id has another text now; one line for each such id."""


class StoreUnreachable(Exception):
    """What was published cannot be read or kept now."""


@dataclass(frozen=True, slots=True)
class Published:
    """What is known of one published id. ``published_at`` is in seconds since 1970."""

    sha256: str
    published_at: float


class PublishedStore(Protocol):
    """Where hashes of published versions are kept, for ever. Blocks; called from a thread."""

    def read(self) -> Mapping[str, Published]:
        """All that was published, by id. Raises StoreUnreachable."""

    def publish(self, hashes: Mapping[str, str], *, at: float) -> Mapping[str, Published]:
        """Keep those whose id is new, then read all. Raises StoreUnreachable."""


class SqlitePublished:
    """Keeps them in the SQLite file of ``state.url``."""

    def __init__(self, url: str) -> None:
        self._engine = create_engine(url, poolclass=NullPool)
        event.listen(self._engine, "connect", _wait_for_others)
        event.listen(self._engine, "begin", _begin_writing)

    def read(self) -> Mapping[str, Published]:
        """All that was published, by id."""
        return self.publish({}, at=0.0)

    def publish(self, hashes: Mapping[str, str], *, at: float) -> Mapping[str, Published]:
        """Keep those whose id is new: of two processes that start at once, one wins, and both see it."""
        try:
            with self._engine.begin() as connection:
                connection.execute(CreateTable(_PUBLISHED, if_not_exists=True))
                count = connection.execute(select(func.count()).select_from(_PUBLISHED)).scalar_one()
                if count + len(hashes) > MAX_PUBLISHED:
                    raise StoreUnreachable(f"{count} prompt versions are published; allowed: {MAX_PUBLISHED}")
                if hashes:
                    rows = [{"id": i, "sha256": sha256, "published_at": at} for i, sha256 in hashes.items()]
                    connection.execute(insert(_PUBLISHED).on_conflict_do_nothing(), rows)
                found = connection.execute(select(_PUBLISHED)).all()
        except SQLAlchemyError as error:
            raise StoreUnreachable(type(error).__name__) from error
        return {row.id: Published(row.sha256, row.published_at) for row in found}


def _wait_for_others(connection: object, _record: object) -> None:
    cursor = connection.cursor()  # type: ignore[attr-defined]
    cursor.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
    cursor.close()
    connection.isolation_level = None  # type: ignore[attr-defined]


def _begin_writing(connection: Connection) -> None:
    """What reads first and then writes cannot wait for others; what means to write from the start can."""
    connection.exec_driver_sql("BEGIN IMMEDIATE")


class Publishing:
    """Publishes a gateway's prompt versions, and refuses changed ones.

    Args:
        versions: those of the folder.
        store: what was published before.
        unix_time: seconds since 1970.
    """

    def __init__(
        self, versions: PromptVersions, store: PublishedStore, *, unix_time: Callable[[], float]
    ) -> None:
        self._versions = versions
        self._store = store
        self._unix_time = unix_time
        self._published: Mapping[str, Published] = {}

    def published_at(self, version_id: str) -> str | None:
        """When a version was published, in ISO 8601; ``None`` while that is not known."""
        known = self._published.get(version_id)
        return None if known is None else _iso(known.published_at)

    def publish(self) -> None:
        """Publish what is new; blocks on disk.

        Raises:
            PromptChanged: a published id has another text now.
        """
        hashes = {version.id: version.sha256 for version in self._versions.all}
        try:
            self._published = self._store.publish(hashes, at=self._unix_time())
        except StoreUnreachable as error:
            log = structlog.get_logger("gateway")
            log.warning("prompt versions not compared with what was published", reason=str(error))
            return
        self._refuse_changed()

    def check(self) -> int:
        """How many versions of the folder are published already; publishes nothing; blocks on disk.

        Raises:
            PromptChanged: a published id has another text now.
            StoreUnreachable: that cannot be told.
        """
        self._published = self._store.read()
        self._refuse_changed()
        return sum(version.id in self._published for version in self._versions.all)

    def _refuse_changed(self) -> None:
        lines = []
        for version in self._versions.all:
            known = self._published.get(version.id)
            if known is not None and known.sha256 != version.sha256:
                lines.append(
                    f"{self._versions.file_of(version.id)}: id: given {version.id!r} with sha256 "
                    f"{version.sha256}, but it was published on {_iso(known.published_at)} with sha256 "
                    f"{known.sha256}; a published version does not change: give the new text a new id, or "
                    "put the published text back"
                )
        if lines:
            raise PromptChanged("\n".join(lines))


def _iso(unix_time: float) -> str:
    return datetime.fromtimestamp(unix_time, UTC).isoformat(timespec="seconds")
