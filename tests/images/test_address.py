"""Which addresses images are fetched from, and which are refused before anything connects."""

from __future__ import annotations

import time
from ipaddress import ip_network

import pytest

from gateway.images.address import BadAddress, parse_address, reachable, redirected

PRIVATE = [
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "10.255.255.255",
    "100.64.0.1",
    "100.100.100.200",
    "100.127.255.255",
    "127.0.0.1",
    "127.255.255.254",
    "168.63.129.16",
    "169.254.0.1",
    "169.254.169.254",
    "169.254.170.2",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.1",
    "192.0.2.1",
    "192.88.99.1",
    "192.0.0.192",
    "192.168.0.1",
    "198.18.0.1",
    "198.51.100.7",
    "203.0.113.7",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::7f00:1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::ffff:169.254.169.254",
    "::ffff:8.8.8.8",
    "64:ff9b::7f00:1",
    "64:ff9b::808:808",
    "64:ff9b:1::1",
    "100::1",
    "2001::1",
    "2001:db8::1",
    "2002:7f00:1::",
    "2002:808:808::1",
    "4000::1",
    "fc00::1",
    "fd00:ec2::254",
    "fd12:3456:789a::1",
    "fe80::1",
    "fe80::1%eth0",
    "fec0::1",
    "ff02::1",
    "ff0e::1",
    "",
    "not an address",
]
PUBLIC = ["1.1.1.1", "8.8.8.8", "93.184.216.34", "172.32.0.1", "2606:4700:4700::1111", "2a00:1450:4001::1"]


@pytest.mark.parametrize("address", PRIVATE)
def test_a_host_with_an_address_that_is_not_public_is_refused_even_among_public_ones(address: str) -> None:
    for found in ([address], ["8.8.8.8", address], [address, "8.8.8.8"]):
        with pytest.raises(BadAddress, match="not known or not public"):
            reachable(found)


def test_a_host_with_public_addresses_alone_is_reachable() -> None:
    assert reachable(PUBLIC) == PUBLIC


def test_a_host_without_an_address_is_refused_in_the_same_words_as_a_private_one() -> None:
    said = set()
    for found in ([], ["10.0.0.1"]):
        with pytest.raises(BadAddress) as refused:
            reachable(found)
        said.add((str(refused.value), refused.value.allowed))
    assert len(said) == 1


def test_a_private_network_is_reachable_where_the_configuration_names_it() -> None:
    networks = [ip_network("10.7.0.0/16"), ip_network("64:ff9b::/96")]
    assert reachable(["10.7.3.4", "64:ff9b::808:808", "8.8.8.8"], networks)
    with pytest.raises(BadAddress):
        reachable(["10.8.3.4"], networks)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "a.png",
        "/a.png",
        "//host/a.png",
        "file:///etc/passwd",
        "ftp://host/a.png",
        "gopher://host:70/_x",
        "http:/host/a",
        "http://",
        "http:///a.png",
        "http://:80/a.png",
        "https://user@host/a.png",
        "https://user:secret@host/a.png",
        "https://public.example@10.0.0.1/a.png",
        "https://host:0/a.png",
        "https://host:99999/a.png",
        "https://host:port/a.png",
        "https://[::1/a.png",
        "https://[::1%eth0]/a.png",
        "https://ho st/a.png",
        "https://host\\@other/a.png",
        "https://host/a.png\r\nx: y",
        "https://host/\x00",
        " https://host/a.png",
        "https://ho%73t/a.png",
        "https://a..b/a.png",
        "https://host/" + "a" * 9_000,
        "javascript:alert(1)",
    ],
)
def test_what_is_no_address_of_a_host_is_refused(url: str) -> None:
    with pytest.raises(BadAddress) as refused:
        parse_address(url)
    assert "secret" not in str(refused.value) and refused.value.allowed


@pytest.mark.parametrize(
    ("url", "host", "port", "target", "header"),
    [
        ("https://Example.org", "example.org", 443, "/", "example.org"),
        (
            "http://example.org.:8080/a%20b?c=d e#f".replace(" ", "+"),
            "example.org",
            8080,
            "/a%20b?c=d+e",
            None,
        ),
        ("https://[2606:4700::1]/x", "2606:4700::1", 443, "/x", "[2606:4700::1]"),
        ("https://bücher.example/ü?ß", "xn--bcher-kva.example", 443, "/%C3%BC?%C3%9F", None),
        ("http://2130706433/", "2130706433", 80, "/", "2130706433"),
        ("HTTP://127.1/", "127.1", 80, "/", "127.1"),
    ],
)
def test_an_address_is_taken_apart_once(
    url: str, host: str, port: int, target: str, header: str | None
) -> None:
    found = parse_address(url)
    assert (found.host, found.port, found.target) == (host, port, target)
    assert header is None or found.host_header == header
    assert found.target.isascii() and parse_address(found.url) == found


def test_only_listed_hosts_are_allowed_where_there_is_a_list() -> None:
    hosts = ("cdn.example.org", ".images.example")
    for url in ("https://cdn.example.org/a", "https://x.images.example/a", "https://CDN.example.org./a"):
        assert parse_address(url, hosts)
    for url in ("https://example.org/a", "https://xcdn.example.org/a", "https://images.example/a"):
        with pytest.raises(BadAddress, match="not listed"):
            parse_address(url, hosts)


def test_a_redirect_is_checked_like_an_address() -> None:
    first = parse_address("https://cdn.example.org/a/b?c")
    assert redirected(first, "../d").url == "https://cdn.example.org/d"
    assert redirected(first, "//other.example/x").url == "https://other.example/x"
    for location in ("file:///etc/passwd", "http://user@host/", "http://[", "ht tp://x"):
        with pytest.raises(BadAddress):
            redirected(first, location)
    with pytest.raises(BadAddress, match="not listed"):
        redirected(first, "https://evil.example/", ("cdn.example.org",))


def test_a_host_of_combining_marks_is_refused_before_python_sorts_them() -> None:
    url = "http://a" + "\u0345" * 4_000 + "\u0316" * 4_000  # sorted, they take 0.2 s in Python 3.11

    def refusal_s() -> float:
        began = time.process_time()
        with pytest.raises(BadAddress, match="is not an address"):
            parse_address(url)
        return time.process_time() - began

    assert min(refusal_s() for _ in range(5)) < 0.02
