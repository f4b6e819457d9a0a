"""Groups addresses that count as one sender."""

from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address

Network = IPv4Network | IPv6Network


def source_of(address: str, proxies: Sequence[Network]) -> str:
    """The sender that an address belongs to: an IPv4 address or an IPv6 /64.

    The sender is empty for a trusted proxy and if there is no address.
    """
    try:
        ip = ip_address(address)
    except ValueError:
        return ""
    if isinstance(ip, IPv6Address):
        ip = ip.ipv4_mapped or ip
    if any(ip in network for network in proxies):
        return ""
    return str(IPv6Network((ip, 64), strict=False)) if isinstance(ip, IPv6Address) else str(ip)
