"""Checks the addresses from which images are fetched: the URL, its host, and the host's IP addresses."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, ip_address, ip_network
from typing import Final
from urllib.parse import quote, urljoin, urlsplit

from gateway.contracts.addresses import Network

MAX_URL: Final = 8_192  # longest URL, in characters; signed URLs have about 1,500
MAX_HOST: Final = 300
"""Longest host with its port, in characters; a name has 253. Of combining marks a long one takes a second to
split: Python sorts them."""
_PORTS: Final = {"http": 80, "https": 443}
_HOST: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})|\[[0-9A-Fa-f:.]{2,45}\]")
# The global addresses of IPv6. Others embed or translate IPv4 addresses, or belong to one network only.
_GLOBAL: Final = ip_network("2000::/3")
_SIX_TO_FOUR: Final = ip_network("2002::/16")
# Formally public addresses that are reachable only inside a cloud: Azure's host, the relays of 6to4, and
# those of protocols, which older Pythons count as public; one is Oracle's metadata service (192.0.0.192).
_OF_CLOUDS: Final = tuple(map(ip_network, ("168.63.129.16/32", "192.88.99.0/24", "192.0.0.0/24")))


class BadAddress(ValueError):
    """The address is refused; ``allowed`` describes an acceptable one."""

    def __init__(self, problem: str, allowed: str) -> None:
        self.allowed = allowed
        super().__init__(problem)


@dataclass(frozen=True, slots=True)
class ImageAddress:
    """A URL in the parts that an HTTP request needs."""

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
        """The whole URL, to resolve relative ones."""
        return f"{self.scheme}://{self.host_header}{self.target}"


def parse_address(url: str, hosts: Collection[str] = ()) -> ImageAddress:
    """Parse and check a URL. Raises BadAddress.

    If ``hosts`` is not empty, only these hosts are allowed; ``.example.com`` allows all subdomains.
    """
    if len(url) > MAX_URL:
        raise BadAddress(f"has {len(url)} characters", f"{MAX_URL} or fewer")
    if not url.isprintable() or " " in url or "\\" in url:
        raise BadAddress("has blanks, backslashes or control characters", "an address without them")
    try:
        if len(re.split("[/?#]", url.partition("//")[2], maxsplit=1)[0]) > MAX_HOST:
            raise ValueError
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
    """Return the target of a redirect, with the same checks. Raises BadAddress."""
    try:
        url = urljoin(address.url, location)
    except ValueError:
        raise BadAddress("leads to what is not an address", "https://HOST/PATH") from None
    return parse_address(url, hosts)


def reachable(found: Sequence[str], networks: Sequence[Network] = ()) -> Sequence[str]:
    """Return a host's IP addresses. Raises BadAddress unless each is public or in ``networks``."""
    if not found or not all(_allowed(one, networks) for one in found):
        # Unknown and private hosts get the same message, so that callers learn no names of a private network.
        raise BadAddress("is at a host that is not known or not public", "a public host")
    return found


def _allowed(text: str, networks: Sequence[Network]) -> bool:
    try:
        address = ip_address(text)
    except ValueError:  # for example an address with a zone
        return False
    if any(address in network for network in networks):
        return True
    if address.is_multicast or address.is_reserved or not address.is_global:
        return False
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _OF_CLOUDS)
    return address in _GLOBAL and address not in _SIX_TO_FOUR
