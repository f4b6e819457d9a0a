"""Which connections stay when there are too many."""

from __future__ import annotations

from ipaddress import ip_network

from gateway.http.connections import RESERVE, ConnectionTable
from gateway.server import OTHER_FILES, connections_within


class Connection:
    def __init__(self) -> None:
        self.open = True

    def give_way(self) -> None:
        self.open = False


def opened(table: ConnectionTable, number: int, address: str) -> list[Connection]:
    connections = [Connection() for _ in range(number)]
    for one in connections:
        table.open(one, address)
    return connections


def test_an_address_has_its_share_and_a_trusted_proxy_none() -> None:
    table = ConnectionTable(total=8, proxies=(ip_network("10.0.0.0/8"),))
    kept = opened(table, 4, "192.0.2.1")
    over, mapped = Connection(), Connection()
    refusal = table.open(over, "192.0.2.1")
    assert refusal is not None and refusal.status == 429 and refusal.retry_after_s
    assert all(one.open for one in kept)
    assert table.open(mapped, "::ffff:192.0.2.1") is not None
    assert all(table.open(Connection(), f"10.0.0.{n}") is None for n in range(4))
    table.close(over)
    table.close(mapped)
    table.close(kept[0])
    assert table.open(Connection(), "192.0.2.1") is None


def test_the_addresses_of_one_ipv6_network_share() -> None:
    table = ConnectionTable(total=100, per_address=2)
    opened(table, 2, "2001:db8::1")
    assert table.open(Connection(), "2001:db8::2:3") is not None
    assert table.open(Connection(), "2001:db8:0:1::1") is None


def test_a_proxy_may_use_every_connection() -> None:
    table = ConnectionTable(total=8, proxies=(ip_network("10.0.0.1"),))
    connections = opened(table, 8, "10.0.0.1")
    assert all(one.open for one in connections)
    assert table.open(Connection(), "192.0.2.1") is None
    assert [one.open for one in connections] == [False] + [True] * 7


def test_unused_connections_are_closed_first_then_idle_ones_and_busy_ones_never() -> None:
    table = ConnectionTable(total=3, per_address=9)
    busy, idle, unused = opened(table, 3, "a")
    del table.unused[busy]  # its request is in progress
    del table.unused[idle]
    table.idle[idle] = None
    first, second = Connection(), Connection()
    assert table.open(first, "b") is None
    assert not unused.open and idle.open
    del table.unused[first]
    assert table.open(second, "b") is None
    assert not idle.open and busy.open
    del table.unused[second]
    refusal = table.open(Connection(), "b")
    assert refusal is not None and refusal.status == 503 and busy.open and first.open and second.open


def test_the_reserve_is_bounded_and_its_newest_stays() -> None:
    table = ConnectionTable(total=1, per_address=10_000)
    table.open(busy := Connection(), "192.0.2.1")
    del table.unused[busy]
    surplus = opened(table, 10 * RESERVE, "192.0.2.1")
    assert [one.open for one in surplus] == [False] * 9 * RESERVE + [True] * RESERVE
    assert busy.open and len(table) == 1 + RESERVE
    for one in [busy, *surplus, *surplus]:
        table.close(one)
    assert len(table) == 0


def test_callers_leave_half_of_too_few_open_files_for_workers_and_stores() -> None:
    enough = 4096 + RESERVE + OTHER_FILES
    assert connections_within(enough, 4096) == 4096
    assert connections_within(enough - 1, 4096) == 4095
    assert connections_within(1024, 4096) == (1024 - RESERVE) // 2
    assert connections_within(1024, 100) == 100
    assert connections_within(64, 4096) == 1
