"""The accepted keys: the bootstrap keys, given at the start, and the keys that operators created."""

import hashlib
import hmac
import os
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

# Salts make the admin key's digest differ between processes, and each created key's from all others.
SALT_BYTES = 16
SECRET_BYTES = 32  # 256 random bits: too many to try, however cheap the digest
PREFIX_BYTES = 6  # 48 random bits: a collision among 100,000 keys has a chance of 1 in 50,000, and is refused
MAX_KEYS = 100_000  # most valid keys: each is about 1 KB of memory in every process, so 100 MB at most
# Highest priority that a request may ask for.
HIGHEST_PRIORITY = 1
_MARK: Final = "slc"


class CallerRole(StrEnum):
    """What a key may do; the values are part of the public API."""

    CALLER = "caller"
    VIEWER = "viewer"
    FRONT = "front"
    OPERATOR = "operator"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """A key's limits; ``None``: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None


NO_LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True)
class Budget:
    """The budgets of a day and of a calendar month (UTC), in nano US dollars; ``None``: no limit."""

    nanousd_per_day: int | None = None
    nanousd_per_month: int | None = None


NO_BUDGET = Budget()


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """A key's limits and budget for one model."""

    model: str
    limits: KeyLimits = NO_LIMITS
    budget: Budget = NO_BUDGET


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A key's properties, from which the key cannot be derived.

    ``routes``, ``adapters`` (aliases included) and ``models`` are those that the key may use, ``None`` means
    all; ``aliases`` are the key's own names of models, each with the model's id or alias; ``max_priority``
    caps the priority of its requests; ``tools``: whether its requests may have tools; ``expires_at`` is Unix
    seconds; ``org`` is the tenant's organization; ``model_limits`` apply in addition to the other limits.
    """

    tenant: str
    role: CallerRole
    key_id: str
    max_priority: int
    routes: tuple[str, ...] | None = None
    adapters: tuple[str, ...] | None = None
    limits: KeyLimits = NO_LIMITS
    expires_at: float | None = None
    org: str | None = None
    budget: Budget = NO_BUDGET
    tools: bool = True
    models: tuple[str, ...] | None = None
    aliases: tuple[tuple[str, str], ...] = ()
    model_limits: tuple[ModelLimits, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A created key as it is stored: lookups use ``prefix``, its public part; ``digest`` is the hash of salt
    and whole key; ``author`` is the id of the key that created it.
    """

    record: KeyRecord
    prefix: str
    salt: bytes = field(repr=False)
    digest: bytes = field(repr=False)
    comment: str = ""
    author: str = ""
    created_at: float = 0.0


# With authentication off every caller is the local operator: no key, all rights, one tenant.
LOCAL_OPERATOR = KeyRecord("default", CallerRole.ADMIN, "local", HIGHEST_PRIORITY)
BOOTSTRAP_ADMIN = KeyRecord("default", CallerRole.ADMIN, "bootstrap", HIGHEST_PRIORITY)
BOOTSTRAP_FRONT = KeyRecord("default", CallerRole.FRONT, "front", HIGHEST_PRIORITY)


@dataclass(frozen=True, slots=True)
class NewSecret:
    """A new key: ``key`` is shown once, to its creator, and not stored."""

    prefix: str
    key: str = field(repr=False)
    salt: bytes = field(repr=False)
    digest: bytes = field(repr=False)


def draw_key() -> NewSecret:
    """A new key, ``slc_<prefix>_<secret>`` with a secret of 32 random bytes."""
    prefix, salt = os.urandom(PREFIX_BYTES).hex(), os.urandom(SALT_BYTES)
    key = f"{_MARK}_{prefix}_{os.urandom(SECRET_BYTES).hex()}"
    return NewSecret(prefix, key, salt, salted_digest(salt, key.encode()))


def salted_digest(salt: bytes, key: bytes) -> bytes:
    """SHA-256 over salt and key.

    A fast digest is enough for keys of 256 random bits: slow ones protect passwords that people choose, and
    would cost time on every request.
    """
    return hashlib.sha256(salt + key).digest()


class KeyRing:
    """The accepted keys, each stored as a salted SHA-256. If not ``enabled``, no key is required. Without
    ``admin_key`` and ``front_key`` only created keys are accepted.
    """

    def __init__(
        self,
        admin_key: str | None,
        *,
        enabled: bool,
        front_key: str | None = None,
        unix_time: Callable[[], float] = time.time,
        digest: Callable[[bytes, bytes], bytes] = salted_digest,
    ) -> None:
        self._enabled = enabled
        self._time = unix_time
        self._digest_of = digest
        self._salt = os.urandom(SALT_BYTES)
        first = ((admin_key, BOOTSTRAP_ADMIN), (front_key, BOOTSTRAP_FRONT))
        self._first = [(self._digest_of(self._salt, _bytes_of(key)), record) for key, record in first if key]
        self._by_prefix: dict[str, StoredKey] = {}
        self._prefixes: list[str] = []
        self._by_id: dict[str, StoredKey] = {}
        # While there are no created keys, every key is compared with this one; no key has its digest.
        self._decoy = StoredKey(
            LOCAL_OPERATOR, "", os.urandom(SALT_BYTES), os.urandom(hashlib.sha256().digest_size)
        )

    def lookup(self, bearer: str | None) -> KeyRecord | None:
        """The record of ``bearer``, the key without its scheme.

        ``None`` when the key is missing, unknown, revoked or expired. A lookup takes the same time for every
        key of one length: a key with an unknown prefix is compared with the digest of the next prefix, whose
        entry is as likely to be in the processor's cache as any. So the time reveals neither how much of a
        key is right nor which prefixes exist. Only the digest of the whole key decides.
        """
        if not self._enabled:
            return LOCAL_OPERATOR
        if not bearer:
            return None
        given, stored = _bytes_of(bearer), self._decoy
        if self._prefixes:
            mark, _, rest = bearer.partition("_")
            prefix, _, _ = rest.partition("_")
            place = bisect_left(self._prefixes, prefix if mark == _MARK else "")
            stored = self._by_prefix[self._prefixes[place % len(self._prefixes)]]
        is_stored = hmac.compare_digest(self._digest_of(stored.salt, given), stored.digest)
        digest, own = self._digest_of(self._salt, given), None
        for known, record in self._first:  # no break: the time must not tell which one matches
            if hmac.compare_digest(digest, known):
                own = record
        if own is not None:
            return own
        return self._in_force(stored) if is_stored and stored is not self._decoy else None

    def by_id(self, key_id: str) -> KeyRecord | None:
        """The record of a key that is accepted now."""
        if not self._enabled:
            return LOCAL_OPERATOR
        for own in [record for _, record in self._first if record.key_id == key_id]:
            return own
        stored = self._by_id.get(key_id)
        return None if stored is None else self._in_force(stored)

    def _in_force(self, stored: StoredKey) -> KeyRecord | None:
        expires_at = stored.record.expires_at
        return stored.record if expires_at is None or self._time() < expires_at else None

    def add(self, key: StoredKey) -> None:
        """Accept a key from now on; a key with a known id or prefix is ignored."""
        if key.prefix not in self._by_prefix and key.record.key_id not in self._by_id:
            self._by_prefix[key.prefix] = self._by_id[key.record.key_id] = key
            insort(self._prefixes, key.prefix)

    def change(self, key: StoredKey) -> None:
        """Replace a known key, whose id and prefix stay."""
        self._by_prefix[key.prefix] = self._by_id[key.record.key_id] = key

    def remove(self, key_id: str) -> bool:
        """Stop accepting a key; ``False``: unknown id."""
        key = self._by_id.pop(key_id, None)
        if key is None:
            return False
        del self._by_prefix[key.prefix]
        del self._prefixes[bisect_left(self._prefixes, key.prefix)]
        return True

    def get(self, key_id: str) -> StoredKey | None:
        """A created key that was not revoked."""
        return self._by_id.get(key_id)

    @property
    def created(self) -> Sequence[StoredKey]:
        """The created keys that were not revoked, oldest first; expired ones included."""
        return tuple(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)


def _bytes_of(key: str) -> bytes:
    # A header may decode to lone surrogates; such a key must be refused without an exception.
    return key.encode("utf-8", "surrogatepass")
