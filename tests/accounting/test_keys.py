"""The key ring: who a key belongs to, and that it keeps no key."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting.keys import KeyRing, KeyRole


def test_the_admin_key_belongs_to_an_admin() -> None:
    record = KeyRing("sk-right", enabled=True).lookup("sk-right")
    assert record is not None
    assert (record.role, record.tenant, record.max_priority) == (KeyRole.ADMIN, "default", 1)


@pytest.mark.parametrize("bearer", [None, "", "sk-wrong", "sk-righ", "sk-right ", "\ud800"])
def test_a_missing_or_wrong_key_belongs_to_nobody(bearer: str | None) -> None:
    assert KeyRing("sk-right", enabled=True).lookup(bearer) is None


@pytest.mark.parametrize("admin_key", [None, ""])
@pytest.mark.parametrize("bearer", [None, "", "anything"])
def test_without_an_admin_key_nobody_gets_in(admin_key: str | None, bearer: str | None) -> None:
    assert KeyRing(admin_key, enabled=True).lookup(bearer) is None


@pytest.mark.parametrize("bearer", [None, "", "anything"])
def test_with_authentication_off_everybody_is_the_local_operator(bearer: str | None) -> None:
    record = KeyRing("sk-right", enabled=False).lookup(bearer)
    assert record is not None
    assert (record.tenant, record.role, record.key_id) == ("default", KeyRole.ADMIN, "local")


@given(key=st.text(min_size=1), other=st.text())
def test_only_the_very_key_is_right(key: str, other: str) -> None:
    ring = KeyRing(key, enabled=True)
    assert ring.lookup(key) is not None
    assert (ring.lookup(other) is not None) == (other == key)


def test_the_ring_keeps_a_salted_digest_and_not_the_key() -> None:
    first, second = KeyRing("sk-right", enabled=True), KeyRing("sk-right", enabled=True)
    kept = [getattr(first, slot) for slot in KeyRing.__slots__]
    assert not any("sk-right" in repr(value) for value in kept)
    assert first._admin_digest != second._admin_digest
