"""Authenticates requests by their bearer key."""

from collections.abc import Callable
from dataclasses import fields

from accounting.keys import KeyRecord, KeyRing
from gateway.contracts.values import Caller
from gateway.errors import InvalidKey, MissingKey

MAX_REVOKED = 1_000  # the most cached callers in addition to those of accepted keys


class Keys:
    """Maps the key ring's records to callers; ``on_use`` gets the id of a created key at each use."""

    def __init__(self, ring: KeyRing, on_use: Callable[[str], None] = lambda key_id: None) -> None:
        self._ring = ring
        self._on_use = on_use
        # By key id; a key that was created again has another record.
        self._callers: dict[str, tuple[KeyRecord, Caller]] = {}

    def authenticate(self, bearer: str | None) -> Caller:
        """Return the caller of a key. Raises MissingKey; InvalidKey if it is unknown, revoked or expired."""
        record = self._ring.lookup(bearer)
        if record is not None:
            if self._ring.get(record.key_id) is not None:
                self._on_use(record.key_id)
            return self._caller(record)
        if bearer is None:
            raise MissingKey("send a key as 'Authorization: Bearer KEY'")
        raise InvalidKey("the key is not known here, was revoked or has expired")

    def by_id(self, key_id: str) -> Caller:
        record = self._ring.by_id(key_id)
        if record is None:
            raise InvalidKey("the key of the request was revoked or has expired")
        return self._caller(record)

    def _caller(self, record: KeyRecord) -> Caller:
        known = self._callers.get(record.key_id)
        if known is None or known[0] is not record:
            if len(self._callers) > len(self._ring) + MAX_REVOKED:
                self._callers.clear()
            same = {one.name: getattr(record, one.name) for one in fields(KeyRecord)}
            known = self._callers[record.key_id] = record, Caller(**same)
        return known[1]
