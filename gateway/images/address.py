"""Which addresses images are fetched from: the URL, its host, and the IP addresses that the host has."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final
from urllib.parse import quote, urljoin, urlsplit

MAX_URL: Final = 8_192
"""Longest address, in characters; signed ones have some 1,500."""
_PORTS: Final = {"http": 80, "https": 443}
_HOST: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})|\[[0-9A-Fa-f:.]{2,45}\]")
# What is global in IPv6. The rest embeds or translates IPv4 addresses, or is of one network alone.
_GLOBAL: Final = ip_network("2000::/3")
_SIX_TO_FOUR: Final = ip_network("2002::/16")
# Public by their numbers, and reached inside a cloud alone: Azure's host, and the relays of 6to4.
_OF_CLOUDS: Final = (ip_network("168.63.129.16/32"), ip_network("192.88.99.0/24"))
Network = IPv4Network | IPv6Network


class BadAddress(ValueError):
    """Nothing is fetched from there; ``allowed`` says what could be."""

    def __init__(self, problem: str, allowed: str) -> None:
        self.allowed = allowed
        super().__init__(problem)


@dataclass(frozen=True, slots=True)
class ImageAddress:
    """An address, in the parts of a request."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The whole, for what is relative to it."""
        return f"{self.scheme}://{self.host_header}{self.target}"


def parse_address(url: str, hosts: Collection[str] = ()) -> ImageAddress:
    """The address that a URL names. Raises BadAddress.

    With ``hosts`` only these are allowed, and with a dot in front the hosts below one.
    """
    if len(url) > MAX_URL:
        raise BadAddress(f"has {len(url)} characters", f"{MAX_URL} or fewer")
    if not url.isprintable() or " " in url or "\\" in url:
        raise BadAddress("has blanks, backslashes or control characters", "an address without them")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise BadAddress("is not an address", "https://HOST/PATH") from None
    if parts.scheme not in _PORTS:
        raise BadAddress("is not an address of http or https", "https://, http:// or data:")
    if "@" in parts.netloc:
        raise BadAddress("has a user name or password", "an address without them")
    name = parts.hostname or ""
    try:
        host = name if ":" in name else name.rstrip(".").encode("idna").decode()
    except UnicodeError:
        host = ""
    if not _HOST.fullmatch(f"[{host}]" if ":" in host else host) or port == 0:
        raise BadAddress("is not an address", "https://HOST/PATH")
    if hosts and not any(host == one or (one.startswith(".") and host.endswith(one)) for one in hosts):
        raise BadAddress("is at a host that is not listed", "a host of images.fetch_hosts")
    target = quote(parts.path or "/", safe="/:@!$&'()*+,;=~%-._")
    if parts.query:
        target += "?" + quote(parts.query, safe="/?:@!$&'()*+,;=~%-._")
    return ImageAddress(parts.scheme, host, port or _PORTS[parts.scheme], target)


def redirected(address: ImageAddress, location: str, hosts: Collection[str] = ()) -> ImageAddress:
    """Where a redirect leads, checked alike. Raises BadAddress."""
    try:
        url = urljoin(address.url, location)
    except ValueError:
        raise BadAddress("leads to what is not an address", "https://HOST/PATH") from None
    return parse_address(url, hosts)


def reachable(found: Sequence[str], networks: Sequence[Network] = ()) -> Sequence[str]:
    """The addresses of a host. Raises BadAddress unless each of them is public or in ``networks``."""
    if not found or not all(_allowed(one, networks) for one in found):
        # One message for a host that is not known and one of a private network: callers learn no names of it.
        raise BadAddress("is at a host that is not known or not public", "a public host")
    return found


def _allowed(text: str, networks: Sequence[Network]) -> bool:
    try:
        address = ip_address(text)
    except ValueError:  # such as one with a zone
        return False
    return any(address in network for network in networks) or _is_public(address)


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    if address.is_multicast or address.is_reserved or not address.is_global:
        return False
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _OF_CLOUDS)
    return address in _GLOBAL and address not in _SIX_TO_FOUR
