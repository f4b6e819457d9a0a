"""The keys in force in this process, computed from the stream ``keys``, and their changes.

An undecodable record, for example of a newer version, is logged and skipped, so that later revocations are
applied.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import structlog

from accounting.keys import MAX_KEYS, KeyRing, StoredKey
from gateway.errors import BackendUnavailable, Forbidden, NoSuchKey
from gateway.keys.last_used import KeyUse
from gateway.keys.records import Changed, Made, Revoked, changed_data, key_record, made_data, made_key
from gateway.keys.revocations import Revocations
from gateway.state.errors import Conflict, StateUnavailable
from gateway.state.port import Record, StateStore
from gateway.state.projection import FollowedStream

RETRY_MS = 1_000
# Other operators may change keys between a change's base and its record; operators are few.
MAX_TRIES = 20


class KeyProjection(FollowedStream):
    """Applies the stream's records to the ring, and appends records. Lives on the event loop.

    ``folder`` is that of local copies.
    """

    def __init__(self, store: StateStore, ring: KeyRing, use: KeyUse, folder: Path | None = None) -> None:
        self._ring = ring
        self._use = use
        self._log = structlog.get_logger("keys")
        self.revocations = Revocations(
            store, folder, forget=self._forget, knows=lambda key_id: ring.get(key_id) is not None
        )

    def take(self, record: Record) -> None:
        """Apply a record; raises nothing."""
        try:
            event = msgspec.json.decode(record.data, type=Made | Changed | Revoked)
        except msgspec.MsgspecError:
            self._log.error("a key's record is not understood here and was skipped", number=record.number)
            return
        if isinstance(event, Revoked):
            self._forget(event.id)
            self.revocations.stored(event.id)
        elif isinstance(event, Changed):
            known = self._ring.get(event.id)
            if known is not None:  # else it was revoked meanwhile
                self._ring.change(replace(known, record=key_record(event), comment=event.comment))
        elif event.id in self.revocations:
            self._log.warning("a key is refused whose revocation is not stored", key_id=event.id)
        elif len(self._ring) < MAX_KEYS:
            self._ring.add(made_key(event, record))
        else:
            self._log.error("more keys than are allowed; this one is not accepted here", allowed=MAX_KEYS)

    async def make(self, key: StoredKey, *, author: str) -> None:
        """Create a key: accepted here when the call returns, and in every process within a second.

        Raises Forbidden (there are too many keys), BackendUnavailable (the state store cannot be reached).
        """
        if len(self._ring) >= MAX_KEYS:
            raise Forbidden(f"there are {MAX_KEYS} keys; allowed: no more; revoke some that are not used")
        try:
            # Without ``expected``: the change does not depend on earlier records.
            record = await self.followed.append(made_data(key), author=author)
        except StateUnavailable as error:
            raise _unsure(error) from error
        if not await self.caught_up_to(record.number):
            # Not an error: the record is written, and the secret can be shown only now.
            self._log.warning("a new key is not accepted here yet", key_id=key.record.key_id)

    async def change(
        self, key_id: str, decide: Callable[[StoredKey], StoredKey], *, author: str
    ) -> StoredKey:
        """Change a key as ``decide`` says, which is asked again if another change was first.

        It is in force here when the call returns, and in every process within a second.

        Raises:
            NoSuchKey: there is no key of that id.
            BackendUnavailable: the state store cannot be reached, or this process does not follow it.
        """
        for _ in range(MAX_TRIES):
            last, key = self.followed.number, self._ring.get(key_id)
            if key is None:
                raise _no_such(key_id)
            changed = decide(key)
            if changed == key:
                return key
            try:
                record = await self.followed.append(changed_data(changed), author=author, expected=last)
            except Conflict:
                if not await self.caught_up_to(last + 1):
                    break
            except StateUnavailable as error:
                raise _unsure(error) from error
            else:
                if await self.caught_up_to(record.number):
                    return changed
                break
        raise BackendUnavailable(
            "this gateway does not follow the state store; look at the keys before you try again",
            retry_after_ms=RETRY_MS,
        )

    async def revoke(self, key_id: str, *, author: str) -> None:
        """Revoke a key: refused here at once, and in every process within a second after the call returns.

        Raises:
            NoSuchKey: there is no key of that id.
            BackendUnavailable: the state store did not accept the record, or this process does not follow
                the store. The key is refused here nevertheless.
        """
        if self._ring.get(key_id) is None and not self.revocations.unstored(key_id):
            raise _no_such(key_id)
        try:
            record = await self.revocations.revoke(key_id, author)
        except StateUnavailable as error:
            raise BackendUnavailable(
                f"the revocation is not stored: {error}. This gateway refuses the key from now on, has told "
                "the gateways that it reaches, and tries until it is stored; others may accept it until then",
                retry_after_ms=RETRY_MS,
            ) from error
        # If the stream has lost records, an earlier record had this number too.
        if not await self.caught_up_to(record.number) or self.revocations.unstored(key_id):
            raise BackendUnavailable(
                "the revocation was written, but this gateway does not follow the state store; check it",
                retry_after_ms=RETRY_MS,
            )

    def _forget(self, key_id: str) -> None:
        self._ring.remove(key_id)
        self._use.forget(key_id)


def _no_such(key_id: str) -> NoSuchKey:
    return NoSuchKey(f"there is no key {key_id[:64]!r}", param="id")


def _unsure(error: StateUnavailable) -> BackendUnavailable:
    return BackendUnavailable(f"{error}; {error.doubt('the keys')}", retry_after_ms=RETRY_MS)
