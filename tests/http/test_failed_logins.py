"""Wrong keys are throttled by address; a valid key is served from the same address."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_network
from typing import Any

import pytest
from structlog.testing import capture_logs

from accounting.events import LoginFailed
from gateway.errors import RateLimited
from gateway.keys.failed_logins import MAX_ADDRESSES, MAX_FAILED, FailedLogins
from gateway.testing import ADMIN_KEY, CALLER_KEY, fake_services

BODY = {"messages": [{"role": "user", "content": "hi"}]}


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(("path", "valid"), [("/v1/generate", CALLER_KEY), ("/admin/keys", ADMIN_KEY)])
async def test_wrong_keys_beyond_a_number_are_429_and_a_valid_key_of_the_address_is_served(
    connect: Any, path: str, valid: str
) -> None:
    clock, events = Clock(), list[LoginFailed]()
    services = replace(fake_services(), failed_logins=FailedLogins(clock=clock, emit=events.append))
    async with connect(services) as client:
        for number in range(MAX_FAILED):
            wrong = await client.post(path, json=BODY, headers=bearer(f"sk-{number}"))
            assert wrong.status_code == 401
        clock.now += 20.0
        throttled = await client.post(path, json=BODY, headers=bearer("sk-more"))
        assert (throttled.status_code, throttled.headers["retry-after"]) == (429, "40")
        assert "wrong keys" in throttled.text and "sk-more" not in throttled.text
        served = await client.post(path, json=BODY, headers=bearer(valid))
        assert served.status_code not in (401, 429)
        keyless = await client.post(path, json=BODY, headers={"authorization": ""})
        assert keyless.status_code == 401, "no key is no wrong key"
        clock.now += 40.0
        assert (await client.post(path, json=BODY, headers=bearer("sk-later"))).status_code == 401
    assert events == [*[LoginFailed(False)] * MAX_FAILED, LoginFailed(True), LoginFailed(False)]


def throttled(logins: FailedLogins, address: str) -> bool:
    try:
        logins.failed(address)
    except RateLimited:
        return True
    return False


def test_an_address_has_its_own_count_and_a_trusted_proxy_is_counted_and_not_refused() -> None:
    events: list[LoginFailed] = []
    logins = FailedLogins(clock=Clock(), proxies=(ip_network("10.0.0.0/8"),), emit=events.append)
    assert [throttled(logins, "192.0.2.1") for _ in range(MAX_FAILED + 2)][-3:] == [False, True, True]
    assert not throttled(logins, "192.0.2.2")
    assert throttled(logins, "::ffff:192.0.2.1")
    for _ in range(MAX_FAILED):
        logins.failed("2001:db8::1")
    assert throttled(logins, "2001:db8::2"), "a /64 is one sender"
    events.clear()
    assert not any(throttled(logins, "10.1.2.3") for _ in range(2 * MAX_FAILED))
    assert events == [LoginFailed(False)] * (2 * MAX_FAILED)


def test_the_log_names_a_throttled_address_once_a_minute() -> None:
    clock = Clock()
    logins = FailedLogins(clock=clock)
    with capture_logs() as lines:
        for _ in range(2):
            for _ in range(MAX_FAILED + 20):
                throttled(logins, "192.0.2.1")
                throttled(logins, "192.0.2.7")
            clock.now += 60.0
    assert [line["address"] for line in lines] == ["192.0.2.1"] * 2


def test_the_memory_for_addresses_is_bounded_and_the_latest_are_kept() -> None:
    logins = FailedLogins(clock=Clock())
    for _ in range(MAX_FAILED):
        logins.failed("192.0.2.1")
    for number in range(MAX_ADDRESSES - 1):
        logins.failed(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")
    assert throttled(logins, "192.0.2.1")
    logins.failed("192.0.2.2")
    assert not throttled(logins, "192.0.2.1"), "it was the longest without another wrong key"
