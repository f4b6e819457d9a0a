"""Headers in which another Sluice names a tenant: accepted from a front's key, ignored from any other key."""

from __future__ import annotations

import pytest

from gateway.contracts.front_headers import front_headers, on_behalf
from gateway.contracts.values import Caller, CallerRole
from gateway.errors import InvalidRequest

SALT = "5a17"


def headers_of(tenant: str | None, org: str | None, salt: str) -> dict[bytes, bytes]:
    lines = front_headers(tenant, org, salt).split(b"\r\n")[:-1]
    return {name: value for name, _, value in (line.partition(b": ") for line in lines)}


@pytest.mark.parametrize("role", [CallerRole.FRONT, CallerRole.ADMIN])
def test_a_front_speaks_for_a_tenant_within_the_limits_of_its_own_key(role: CallerRole) -> None:
    front = Caller("gateways", role, "key_1", max_priority=1)
    caller = on_behalf(front, headers_of("acme", "acme-group", SALT))
    assert (caller.tenant, caller.org, caller.by_front) == ("acme", "acme-group", True)
    assert (caller.key_id, caller.max_priority, caller.limits) == ("key_1", 1, front.limits)
    assert caller.cache_salt == f"gateways {SALT}"


@pytest.mark.parametrize("role", [CallerRole.CALLER, CallerRole.OPERATOR])
def test_from_any_other_key_the_tenant_has_no_effect_and_the_salt_divides_its_own_cache(
    role: CallerRole,
) -> None:
    attacker = Caller("umbra", role, "key_2", org="umbra-group")
    found = on_behalf(attacker, headers_of("acme", "acme-group", SALT))
    assert (found.tenant, found.org, found.by_front) == ("umbra", "umbra-group", False)
    assert found.cache_salt == f"umbra {SALT}"
    assert attacker.cache_salt == "umbra"
    assert on_behalf(attacker, {b"x-sluice-tenant": b"not a word"}) is attacker


def test_a_cache_salt_with_a_blank_is_refused() -> None:
    """The salt is stored as "tenant salt"; names have no blank, so it never equals another tenant's salt."""
    with pytest.raises(InvalidRequest, match="x-sluice-cache-salt has 3 characters; allowed"):
        on_behalf(Caller("umbra", CallerRole.CALLER, "key_2"), {b"x-sluice-cache-salt": b"a b"})


@pytest.mark.parametrize("name", ["x-sluice-tenant", "x-sluice-org"])
@pytest.mark.parametrize("value", [b"", b"-acme", b"a b", b"a" * 129, b"caf\xe9"])
def test_a_fronts_header_that_is_no_word_is_refused_by_its_name(name: str, value: bytes) -> None:
    front = Caller("gateways", CallerRole.FRONT, "key_1")
    with pytest.raises(InvalidRequest, match=f"{name} has {len(value)} characters; allowed: 1 to 128"):
        on_behalf(front, {b"x-sluice-tenant": b"acme", name.encode(): value})
