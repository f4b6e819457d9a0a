"""Who a key belongs to. First form: one admin key, given at the start."""

from __future__ import annotations

import hashlib
import hmac
import os
from dataclasses import dataclass
from enum import StrEnum

# Makes the digests of two processes differ; drawn anew at each start, since nothing is stored.
SALT_BYTES = 16
# Highest priority that a request may ask for.
HIGHEST_PRIORITY = 1


class KeyRole(StrEnum):
    """What a key may do; the values are those of the public surface."""

    CALLER = "caller"
    OPERATOR = "operator"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """What is known of a key; nothing in it tells the key."""

    key_id: str
    tenant: str
    role: KeyRole
    max_priority: int


# With authentication off every caller is the operator at the machine: no key, all rights, one tenant.
LOCAL_OPERATOR = KeyRecord("local", "default", KeyRole.ADMIN, HIGHEST_PRIORITY)
BOOTSTRAP_ADMIN = KeyRecord("bootstrap", "default", KeyRole.ADMIN, HIGHEST_PRIORITY)


class KeyRing:
    """The keys that are accepted, each kept only as a salted SHA-256.

    A fast digest is enough for keys drawn at random, and a slow one would be paid on every request.

    Args:
        admin_key: the first admin key; ``None`` or empty: there is none, and with authentication on
            nobody gets in.
        enabled: whether keys are asked for at all.
    """

    __slots__ = ("_admin_digest", "_enabled", "_salt")

    def __init__(self, admin_key: str | None, *, enabled: bool) -> None:
        self._enabled = enabled
        self._salt = os.urandom(SALT_BYTES)
        self._admin_digest = self._digest(admin_key) if admin_key else None

    def lookup(self, bearer: str | None) -> KeyRecord | None:
        """The record of ``bearer``, the key without its scheme; ``None`` when it is missing or unknown.

        The time it takes does not depend on how much of the key is right.
        """
        if not self._enabled:
            return LOCAL_OPERATOR
        if not bearer or self._admin_digest is None:
            return None
        if hmac.compare_digest(self._digest(bearer), self._admin_digest):
            return BOOTSTRAP_ADMIN
        return None

    def _digest(self, key: str) -> bytes:
        # A header may decode to lone surrogates; such a key is wrong, not a crash.
        return hashlib.sha256(self._salt + key.encode("utf-8", "surrogatepass")).digest()
