"""The key ring: which tenant a key belongs to, and that the ring stores no key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting.keys import (
    BOOTSTRAP_ADMIN,
    CallerRole,
    KeyRecord,
    KeyRing,
    NewSecret,
    StoredKey,
    draw_key,
    salted_digest,
)


def test_the_admin_key_belongs_to_an_admin() -> None:
    record = KeyRing("sk-right", enabled=True).lookup("sk-right")
    assert record is not None
    assert (record.role, record.tenant, record.max_priority) == (CallerRole.ADMIN, "default", 1)


@pytest.mark.parametrize("bearer", [None, "", "sk-wrong", "sk-righ", "sk-right ", "\ud800"])
def test_a_missing_or_wrong_key_belongs_to_nobody(bearer: str | None) -> None:
    assert KeyRing("sk-right", enabled=True).lookup(bearer) is None


def test_the_fronts_key_belongs_to_a_front_that_may_pass_every_priority_on() -> None:
    ring = KeyRing("sk-admin", front_key="sk-front", enabled=True)
    front, admin = ring.lookup("sk-front"), ring.lookup("sk-admin")
    assert front is not None and (front.role, front.max_priority) == (CallerRole.FRONT, 1)
    assert admin is not None and admin.role is CallerRole.ADMIN
    assert ring.lookup("sk-other") is None


@pytest.mark.parametrize("admin_key", [None, ""])
@pytest.mark.parametrize("bearer", [None, "", "anything"])
def test_without_an_admin_key_nobody_gets_in(admin_key: str | None, bearer: str | None) -> None:
    assert KeyRing(admin_key, enabled=True).lookup(bearer) is None


@pytest.mark.parametrize("bearer", [None, "", "anything"])
def test_with_authentication_off_everybody_is_the_local_operator(bearer: str | None) -> None:
    record = KeyRing("sk-right", enabled=False).lookup(bearer)
    assert record is not None
    assert (record.tenant, record.role, record.key_id) == ("default", CallerRole.ADMIN, "local")


@given(key=st.text(min_size=1), other=st.text())
def test_only_exactly_the_admin_key_is_accepted(key: str, other: str) -> None:
    ring = KeyRing(key, enabled=True)
    assert ring.lookup(key) is not None
    assert (ring.lookup(other) is not None) == (other == key)


def test_the_ring_keeps_a_salted_digest_and_not_the_key() -> None:
    first, second = KeyRing("sk-right", enabled=True), KeyRing("sk-right", enabled=True)
    fields = list(vars(first).values())
    assert not any("sk-right" in repr(value) for value in fields)
    assert first._first != second._first


def stored_key(secret: NewSecret, **changes: Any) -> StoredKey:
    record = KeyRecord("acme", CallerRole.CALLER, f"key_{secret.prefix}", 0)
    return StoredKey(replace(record, **changes), secret.prefix, secret.salt, secret.digest)


def test_a_made_key_belongs_to_its_tenant_until_it_is_removed() -> None:
    ring, secret = KeyRing("sk-right", enabled=True), draw_key()
    ring.add(stored_key(secret))
    found = ring.lookup(secret.key)
    assert found is not None and (found.tenant, found.role) == ("acme", CallerRole.CALLER)
    assert ring.lookup("sk-right") is BOOTSTRAP_ADMIN, "the first admin key stays"
    assert ring.remove(found.key_id) and not ring.remove(found.key_id)
    assert ring.lookup(secret.key) is None and not ring.created


def test_only_the_whole_created_key_is_accepted() -> None:
    ring, secret = KeyRing("sk-right", enabled=True), draw_key()
    ring.add(stored_key(secret))
    other = draw_key().key.rpartition("_")[2]
    for wrong in (
        secret.key[:-1],
        secret.key + "0",
        secret.key.upper(),
        f"slc_{secret.prefix}_",
        f"slc_{secret.prefix}",
        f"slc_{secret.prefix}_{other}",
        secret.key.removeprefix("slc_"),
    ):
        assert ring.lookup(wrong) is None, wrong


def test_a_second_key_of_one_prefix_does_not_replace_the_first() -> None:
    ring, secret = KeyRing(None, enabled=True), draw_key()
    thief = replace(draw_key(), prefix=secret.prefix)
    ring.add(stored_key(secret))
    ring.add(stored_key(thief, tenant="umbra"))
    found = ring.lookup(secret.key)
    assert found is not None and found.tenant == "acme" and len(ring) == 1


def test_a_key_that_has_expired_belongs_to_nobody() -> None:
    now = 1_000.0
    ring, secret = KeyRing(None, enabled=True, unix_time=lambda: now), draw_key()
    ring.add(stored_key(secret, expires_at=1_001.0))
    assert ring.lookup(secret.key) is not None
    now = 1_001.0
    assert ring.lookup(secret.key) is None
    assert len(ring.created) == 1, "it is listed until it is revoked"


def test_every_key_costs_the_same_work_whatever_is_right_of_it() -> None:
    hashed: list[tuple[int, int]] = []

    def digest(salt: bytes, key: bytes) -> bytes:
        hashed.append((len(salt), len(key)))
        return salted_digest(salt, key)

    secret = draw_key()
    work = []
    for admin_key in ("sk-right", None):
        ring = KeyRing(admin_key, enabled=True, digest=digest)
        ring.add(stored_key(secret))
        unknown_prefix, wrong_secret = draw_key().key, secret.key[:-1] + "x"
        for bearer in (secret.key, wrong_secret, unknown_prefix, "x" * len(secret.key)):
            hashed.clear()
            ring.lookup(bearer)
            work.append(tuple(hashed))
    assert len(set(work)) == 1 and len(work[0]) == 2


def test_nothing_that_is_stored_or_shown_reveals_the_key() -> None:
    secret = draw_key()
    key = stored_key(secret)
    last = secret.key.rpartition("_")[2]
    assert len(bytes.fromhex(last)) == 32
    for shown in (repr(key), repr(secret), str(key)):
        assert last not in shown and secret.digest.hex() not in shown
    assert draw_key().key != secret.key and draw_key().salt != secret.salt
