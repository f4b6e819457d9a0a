"""Who a key belongs to: the first admin key, given at the start, and the keys that operators made."""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

# The admin key's digest differs from process to process, and each made key's from every other's.
SALT_BYTES = 16
# 256 random bits: nobody tries them all, whatever the digest costs.
SECRET_BYTES = 32
# 48 random bits tell keys apart; two equal ones among 100,000 keys are a chance in 50,000, and are refused.
PREFIX_BYTES = 6
# Most keys in force: each is about 1 KB of memory in every process, so 100 MB at most.
MAX_KEYS = 100_000
# Highest priority that a request may ask for.
HIGHEST_PRIORITY = 1
_MARK: Final = "slc"


class KeyRole(StrEnum):
    """What a key may do; the values are those of the public surface."""

    CALLER = "caller"
    OPERATOR = "operator"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """How much a key may ask for; ``None``: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None


NO_LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """What is known of a key; nothing in it tells the key.

    Args:
        key_id: its public name.
        tenant: whom its requests are booked to.
        role: what it may do.
        max_priority: its requests' priorities are capped by it.
        routes: the routes that it may use; ``None``: all.
        adapters: the adapters and aliases that it may use; ``None``: all.
        limits: how much it may ask for.
        expires_at: Unix seconds from which on it is not accepted; ``None``: never.
        org: the organization that the tenant belongs to; usage is told by it too.
    """

    key_id: str
    tenant: str
    role: KeyRole
    max_priority: int
    routes: tuple[str, ...] | None = None
    adapters: tuple[str, ...] | None = None
    limits: KeyLimits = NO_LIMITS
    expires_at: float | None = None
    org: str | None = None


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A made key as it is kept.

    Args:
        record: what it may do.
        prefix: the public part of the key, by which it is found.
        salt, digest: of the whole key.
        comment: what its maker said.
        author: the id of the key that made it.
        created_at: Unix seconds.
    """

    record: KeyRecord
    prefix: str
    salt: bytes = field(repr=False)
    digest: bytes = field(repr=False)
    comment: str = ""
    author: str = ""
    created_at: float = 0.0


# With authentication off every caller is the operator at the machine: no key, all rights, one tenant.
LOCAL_OPERATOR = KeyRecord("local", "default", KeyRole.ADMIN, HIGHEST_PRIORITY)
BOOTSTRAP_ADMIN = KeyRecord("bootstrap", "default", KeyRole.ADMIN, HIGHEST_PRIORITY)


@dataclass(frozen=True, slots=True)
class NewSecret:
    """A key that was just drawn: ``key`` is told once, to its maker, and kept nowhere."""

    prefix: str
    key: str = field(repr=False)
    salt: bytes = field(repr=False)
    digest: bytes = field(repr=False)


def draw_key(random_bytes: Callable[[int], bytes] = os.urandom) -> NewSecret:
    """A new key, ``slc_<prefix>_<secret>`` with a secret of 32 random bytes."""
    prefix, salt = random_bytes(PREFIX_BYTES).hex(), random_bytes(SALT_BYTES)
    key = f"{_MARK}_{prefix}_{random_bytes(SECRET_BYTES).hex()}"
    return NewSecret(prefix, key, salt, salted_digest(salt, key.encode()))


def salted_digest(salt: bytes, key: bytes) -> bytes:
    """SHA-256 over salt and key.

    A fast digest is enough for keys of 256 random bits: slow ones protect words that people choose, and
    would be paid on every request.
    """
    return hashlib.sha256(salt + key).digest()


class KeyRing:
    """The keys that are accepted, each kept only as a salted SHA-256.

    Args:
        admin_key: the first admin key; ``None`` or empty: there is none.
        enabled: whether keys are asked for at all.
        unix_time: seconds since 1970, for keys that expire.
        digest: of salt and key.
    """

    __slots__ = (
        "_admin_digest",
        "_by_id",
        "_by_prefix",
        "_digest_of",
        "_enabled",
        "_nobody",
        "_prefixes",
        "_salt",
        "_time",
    )

    def __init__(
        self,
        admin_key: str | None,
        *,
        enabled: bool,
        unix_time: Callable[[], float] = time.time,
        digest: Callable[[bytes, bytes], bytes] = salted_digest,
    ) -> None:
        self._enabled = enabled
        self._time = unix_time
        self._digest_of = digest
        self._salt = os.urandom(SALT_BYTES)
        self._admin_digest = self._digest_of(self._salt, _bytes_of(admin_key)) if admin_key else None
        self._by_prefix: dict[str, StoredKey] = {}
        self._prefixes: list[str] = []
        self._by_id: dict[str, StoredKey] = {}
        # What unknown prefixes and a missing admin key are compared with: no key has these digests.
        self._nobody = StoredKey(
            LOCAL_OPERATOR, "", os.urandom(SALT_BYTES), os.urandom(hashlib.sha256().digest_size)
        )

    def lookup(self, bearer: str | None) -> KeyRecord | None:
        """The record of ``bearer``, the key without its scheme.

        ``None`` when it is missing, unknown, revoked or expired. The same work is done for every key of one
        length: an unknown prefix is compared too, with the digest of its neighbour, whose entry is as cold in
        the processor's cache as any; so the time tells neither how much of a key is right nor which prefixes
        there are. The digest is of the whole key, so it alone decides.
        """
        if not self._enabled:
            return LOCAL_OPERATOR
        if not bearer:
            return None
        given = _bytes_of(bearer)
        stored = self._nearest(_prefix_of(bearer))
        is_stored = hmac.compare_digest(self._digest_of(stored.salt, given), stored.digest)
        is_admin = hmac.compare_digest(
            self._digest_of(self._salt, given), self._admin_digest or self._nobody.digest
        )
        if is_admin and self._admin_digest is not None:
            return BOOTSTRAP_ADMIN
        if not is_stored or stored is self._nobody:
            return None
        expires_at = stored.record.expires_at
        return stored.record if expires_at is None or self._time() < expires_at else None

    def add(self, key: StoredKey) -> None:
        """Accept a key from now on; one whose id or prefix is there already changes nothing."""
        if key.prefix not in self._by_prefix and key.record.key_id not in self._by_id:
            self._by_prefix[key.prefix] = self._by_id[key.record.key_id] = key
            insort(self._prefixes, key.prefix)

    def remove(self, key_id: str) -> bool:
        """Accept a key no longer; ``False``: there was none of that id."""
        key = self._by_id.pop(key_id, None)
        if key is None:
            return False
        del self._by_prefix[key.prefix]
        del self._prefixes[bisect_left(self._prefixes, key.prefix)]
        return True

    def get(self, key_id: str) -> StoredKey | None:
        """A made key that was not revoked."""
        return self._by_id.get(key_id)

    @property
    def made(self) -> Sequence[StoredKey]:
        """The keys that were made and not revoked, oldest first; expired ones included."""
        return tuple(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def _nearest(self, prefix: str) -> StoredKey:
        """The key of this prefix, or one that is no less work."""
        if not self._prefixes:
            return self._nobody
        place = bisect_left(self._prefixes, prefix)
        return self._by_prefix[self._prefixes[place % len(self._prefixes)]]


def _prefix_of(bearer: str) -> str:
    mark, _, rest = bearer.partition("_")
    prefix, _, _ = rest.partition("_")
    return prefix if mark == _MARK else ""


def _bytes_of(key: str) -> bytes:
    # A header may decode to lone surrogates; such a key is wrong, not a crash.
    return key.encode("utf-8", "surrogatepass")
