"""Keys at the door: who a bearer key belongs to."""

from __future__ import annotations

from accounting.keys import KeyRing
from gateway.contracts.values import Caller, CallerRole
from gateway.errors import InvalidKey, MissingKey


class Keys:
    """Maps the key ring's records to callers."""

    def __init__(self, ring: KeyRing) -> None:
        self._ring = ring

    def authenticate(self, bearer: str | None) -> Caller:
        """Who sent this key.

        Raises:
            MissingKey: none was sent.
            InvalidKey: it is not known.
        """
        record = self._ring.lookup(bearer)
        if record is not None:
            return Caller(record.tenant, CallerRole(record.role), record.key_id, record.max_priority)
        if bearer is None:
            raise MissingKey("send a key as 'Authorization: Bearer KEY'")
        raise InvalidKey("the key is not known here")
