"""Revocations fail closed: a revoked key is refused even if the state store has not accepted the record yet.

A gateway that revokes a key refuses it first. While the store does not accept the record, the gateway retries
and announces the revocation to the gateways that the store reaches; a full or read-only Redis can still do
that. It writes a note into the folder of local copies, for gateways on its machine and for its own restart. A
gateway that receives an announcement or finds a note does the same. A duplicate record does no harm.
"""

import asyncio
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Final

import msgspec
import structlog

from accounting.events import error_kind
from gateway.keys.records import STREAM, Revoked
from gateway.state.errors import StateError
from gateway.state.port import MAX_AUTHOR, Record, StateStore
from gateway.weights.records import replace_text

FOLDER: Final = "revoked-keys"
"""The folder of the notes: one file per key, named by the key's id; its content is the author's id."""
NOTES_EVERY_S: Final = 0.25  # seconds between reads of the notes of other processes
RETRY_S: Final = 0.5
"""Seconds between attempts to store and announce a revocation that the store has not accepted."""
_KEY_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(eq=False)
class Revocations:
    """Refuses revoked keys and stores the revocations. Use it only on the event loop.

    Args:
        folder: the folder of local copies; ``None``: no notes are written.
        forget: makes this process refuse a key; ``knows``: whether this process accepts a key.
    """

    store: StateStore
    folder: Path | None
    _: KW_ONLY
    forget: Callable[[str], None]
    knows: Callable[[str], bool]

    def __post_init__(self) -> None:
        self._folder = None if self.folder is None else self.folder / FOLDER
        self._log = structlog.get_logger("keys")
        # Unstored revocations: authors by key id. All collections are bounded by the number of keys.
        self._unstored = self._read()
        self._refused = set(self._unstored)
        self._settled: set[str] = set()
        self._written: set[str] = set()
        self.store.on_announcement(STREAM, self._announced)

    def __contains__(self, key_id: str) -> bool:
        """Whether this process refuses the key, independent of the stream."""
        return key_id in self._refused

    def unstored(self, key_id: str) -> bool:
        """Whether the key has a revocation that the store has not accepted yet."""
        return key_id in self._unstored

    async def revoke(self, key_id: str, author: str) -> Record:
        """Refuse a key from now on, and store the revocation. Raises StateError if it is not stored yet."""
        self._refuse(key_id, author)
        try:
            return await self._append(key_id)
        except StateError:
            self._log.error("a revocation is not stored yet; this gateway refuses the key", key_id=key_id)
            await asyncio.to_thread(self._note)
            await self.store.announce(STREAM, f"{key_id} {author}")
            raise

    def stored(self, key_id: str) -> None:
        """Mark a revocation as stored: its record was read from the stream."""
        self._written.discard(key_id)
        if self._unstored.pop(key_id, None) is not None:
            self._settled.add(key_id)

    async def run(self) -> None:
        """Read notes and store unstored revocations, until cancelled."""
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._follow_notes(), name="revocation-notes")
            loops.create_task(self._store_all(), name="revocations-store")

    def _refuse(self, key_id: str, author: str) -> None:
        self._refused.add(key_id)
        self._unstored[key_id] = author
        self.forget(key_id)

    def _announced(self, text: str) -> None:
        key_id, _, author = text.partition(" ")
        if self.knows(key_id):
            self._log.warning("another gateway announced a revocation that is not stored", key_id=key_id)
            self._refuse(key_id, author[:MAX_AUTHOR])

    async def _follow_notes(self) -> None:
        written_at, known = 0, False
        while True:
            settled, self._settled = self._settled, set()
            # A read in a thread costs a hundred times as much as this look at the folder. Each change is read
            # twice: a note written within a tick of the file system's clock, a few ms, after another does not
            # change the folder's time.
            changed = written_at != (written_at := self._written_at())
            if changed or not known or settled or self._unstored:
                for key_id, author in (await asyncio.to_thread(self._exchange, settled)).items():
                    if key_id not in self._refused:
                        self._refuse(key_id, author)
            known = not changed
            await asyncio.sleep(NOTES_EVERY_S)

    def _written_at(self) -> int:
        """The time of the folder's last change in ns; 0 without a folder."""
        try:
            return 0 if self._folder is None else os.stat(self._folder).st_mtime_ns
        except OSError:
            return 0

    async def _store_all(self) -> None:
        while True:
            await asyncio.sleep(RETRY_S)
            for key_id, author in list(self._unstored.items()):
                with suppress(StateError):
                    if key_id not in self._written:
                        await self._append(key_id)
                        continue
                # Not stored, or stored in a stream that lost records and that gateways no longer follow.
                await self.store.announce(STREAM, f"{key_id} {author}")

    async def _append(self, key_id: str) -> Record:
        author = self._unstored.get(key_id, "gateway")
        record = await self.store.append(STREAM, msgspec.json.encode(Revoked(key_id)), author=author)
        self._written.add(key_id)
        return record

    def _exchange(self, settled: set[str]) -> Mapping[str, str]:
        """Delete notes of stored revocations, write those of unstored ones, return all. Blocks on disk."""
        if self._folder is None:
            return {}
        for key_id in settled:
            try:
                (self._folder / key_id).unlink(missing_ok=True)
            except OSError as error:
                self._log.warning("a note of a revocation is not deleted", reason=error_kind(error))
        if self._unstored:
            self._note()
        return self._read()

    def _note(self) -> None:
        """Write missing notes. Blocks on disk."""
        if self._folder is None:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for key_id, author in list(self._unstored.items()):
                note = self._folder / key_id
                if not note.exists():
                    try:
                        # At once, so that no process reads one without its author.
                        replace_text(note, author)
                    except OSError:
                        note.touch()  # a full disk takes the name, which suffices
        except OSError as error:
            self._log.error("a revocation is not noted on disk", reason=error_kind(error))

    def _read(self) -> dict[str, str]:
        """The authors by key id, also of notes that another user wrote. Blocks on disk."""
        if self._folder is None:
            return {}
        try:
            return {
                note.name: _author(note) for note in self._folder.iterdir() if _KEY_ID.fullmatch(note.name)
            }
        except FileNotFoundError:
            return {}  # there is no note yet
        except OSError as error:
            self._log.error("notes of revocations cannot be read", reason=error_kind(error))
            return {}


def _author(note: Path) -> str:
    """Who revoked the key; the note's name suffices to refuse it."""
    try:
        return note.read_text(errors="replace")[:MAX_AUTHOR] or "gateway"
    except OSError:
        return "gateway"
