"""The audit log: a record in the stream ``audit`` for each action of an operator, chained by hashes.

With a key each record is also signed (``mac``): write access to the store does not suffice to forge one.
"""

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

import orjson
import structlog
from tenacity import retry, retry_if_exception_type, stop_after_attempt

from gateway.contracts.times import iso_time
from gateway.errors import BackendUnavailable, public_error
from gateway.state.errors import Conflict, StateError
from gateway.state.port import MAX_AUTHOR, MAX_READ, Record, StateStore

STREAM = "audit"
KEY_VARIABLE = "SLUICE_AUDIT_KEY"
# Longest target and comment of a record, in characters.
MAX_TARGET = 256
MAX_COMMENT = 1_000
# Another process may append between the read of the last record and the append; operators are few.
_TRIES = 20


class AuditBroken(Exception):
    """A record was changed, removed or inserted; the message names it."""


@dataclass(frozen=True, slots=True)
class AuditChain:
    """The result of a check of the whole audit log.

    Args:
        unsigned: the number of first records written before there was a key; 0 if checked without keys.
    """

    records: int
    unsigned: int
    hashes: Sequence[str]


@dataclass(slots=True)
class AuditedAction:
    """An action that is under way; ``result`` is recorded when it has succeeded."""

    result: str = "done"


def digest(entry: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a shown record: its JSON without ``hash``, sorted keys, no spaces, UTF-8."""
    return hashlib.sha256(_json_without(entry, "hash")).hexdigest()


def signature(entry: Mapping[str, Any], key: bytes) -> str:
    """Return the HMAC-SHA-256 of a record's JSON without ``hash`` and ``mac``, but with ``previous``."""
    return hmac.digest(key, _json_without(entry, "hash", "mac"), "sha256").hex()


def _json_without(entry: Mapping[str, Any], *names: str) -> bytes:
    fields = {name: value for name, value in entry.items() if name not in names}
    return orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)


def verify(entries: Iterable[Mapping[str, Any]], keys: Sequence[bytes] = ()) -> AuditChain:
    """Check the whole log, oldest record first; with ``keys`` also the signatures. Raises AuditBroken.

    Each signature covers the hash of the previous record, and so all records before it. The check does not
    detect that the last records were removed.
    """
    hashes: list[str] = []
    unsigned = 0
    for number, entry in enumerate(entries, 1):
        if entry["number"] != number:
            raise AuditBroken(f"record {number} is missing; record {entry['number']} comes instead")
        if entry.get("hash") != digest(entry):
            raise AuditBroken(f"record {number} is not what its hash was made of")
        if entry.get("previous") != (hashes[-1] if hashes else ""):
            raise AuditBroken(f"record {number} does not hold the hash of the record before it")
        if keys and "mac" not in entry and unsigned == len(hashes):
            unsigned += 1
        elif keys:
            mac = str(entry.get("mac", ""))
            if not any(hmac.compare_digest(mac.encode(), signature(entry, key).encode()) for key in keys):
                raise AuditBroken(f"record {number} is not signed with the key")
        hashes.append(entry["hash"])
    if hashes and unsigned == len(hashes):
        raise AuditBroken(f"no record is signed, up to the last one, {unsigned}")
    return AuditChain(len(hashes), unsigned, hashes)


def _entry(number: int, stored: Mapping[str, Any]) -> dict[str, Any]:
    return {"number": number, **stored, "at": iso_time(stored["at"], "microseconds")}


def _shown(record: Record) -> dict[str, Any]:
    entry = _entry(record.number, orjson.loads(record.data))
    return {**entry, "hash": digest(entry)}


@dataclass(eq=False)
class Audit:
    """Appends records, each with the hash of the previous one; each record is also a line of the log.

    The first of ``keys`` signs the records.

    Fails open: if the store cannot be reached, an error is logged and the record is only in the log. With
    ``required``, an action is recorded before it begins, and refused if the record cannot be written.
    """

    store: StateStore
    _: KW_ONLY
    unix_time: Callable[[], float]
    required: bool = False
    keys: Sequence[bytes] = ()

    def __post_init__(self) -> None:
        self._appending = asyncio.Lock()
        self._log = structlog.get_logger("audit")

    async def record(
        self, who: str, action: str, target: str, *, comment: str = "", result: str = "done"
    ) -> None:
        try:
            await self._append(who, action, target, comment, result)
        except StateError as error:
            self._log.error("audit record is only in the log", action=action, reason=error.code)

    async def _append(self, who: str, action: str, target: str, comment: str, result: str) -> None:
        """Raises StateError."""
        entry = {
            "at": self.unix_time(),
            "who": who,
            "action": action,
            "target": target[:MAX_TARGET],
            "result": result[:MAX_TARGET],
            "comment": comment[:MAX_COMMENT],
        }
        line = {name: entry[name] for name in ("who", "action", "target", "result")}
        try:
            async with self._appending:
                line["hash"] = await self._chained(entry)
        finally:
            self._log.info("operator", **line)

    @retry(retry=retry_if_exception_type(Conflict), stop=stop_after_attempt(_TRIES), reraise=True)
    async def _chained(self, entry: Mapping[str, Any]) -> str:
        """Append ``entry`` after the last record, and return its hash."""
        last = await self.entries(limit=1)
        before = last[0]["number"] if last else 0
        chained = {**entry, "previous": last[0]["hash"] if last else ""}
        if self.keys:
            chained["mac"] = signature(_entry(before + 1, chained), self.keys[0])
        author = str(entry["who"])[:MAX_AUTHOR] or "-"
        record = await self.store.append(STREAM, orjson.dumps(chained), author=author, expected=before)
        return str(_shown(record)["hash"])

    @asynccontextmanager
    async def attempt(
        self, who: str, action: str, target: str, *, comment: str = "", held_back: bool = True
    ) -> AsyncIterator[AuditedAction]:
        """Record the action of the block, with its result, the error that it raises, or its cancellation.

        If records are required and cannot be written, the block is not entered, and BackendUnavailable is
        raised. An action that is not ``held_back``, such as a revocation, begins before its record.
        """
        if self.required and held_back:
            try:
                await self._append(who, action, target, comment, "begun")
            except StateError as error:
                raise BackendUnavailable(
                    f"{action}: its audit record cannot be written ({error.code}), and audit.required is "
                    "true; nothing was changed"
                ) from error
        audited = AuditedAction()
        try:
            yield audited
        except Exception as error:
            public = public_error(error)
            refused = f"refused: {public.code}: {public.message}"
            await self.record(who, action, target, comment=comment, result=refused)
            raise
        except asyncio.CancelledError:
            cancelled = "cancelled: the operator has left; look whether it was made"
            await self.record(who, action, target, comment=comment, result=cancelled)
            raise
        await self.record(who, action, target, comment=comment, result=audited.result)

    async def entries(self, limit: int = MAX_READ, after: int | None = None) -> Sequence[Mapping[str, Any]]:
        """Return the last entries, newest first, or those after a number, oldest first, with their hashes.

        Raises StateUnavailable.
        """
        newest_first = after is None
        page = await self.store.read(STREAM, after=after or 0, limit=limit, newest_first=newest_first)
        return [_shown(record) for record in page]
