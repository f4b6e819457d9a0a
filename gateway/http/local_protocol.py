"""The HTTP protocol of a gateway without keys that only this machine reaches."""

from collections.abc import Sequence
from ipaddress import ip_address
from typing import ClassVar
from urllib.parse import urlsplit

from gateway.contracts.refusals import path_of
from gateway.errors import PublicError
from gateway.http.protocol import GatewayProtocol


class LocalProtocol(GatewayProtocol):
    """Refuses requests to names that are not this machine's, on ``local_ports``.

    The name of a web page may resolve to 127.0.0.1 (DNS rebinding). A browser then lets the page send any
    request here and read the answer, as to its own server; only ``host`` tells the name. Names of loopback
    and ``own_hosts`` are allowed.
    """

    local_ports: ClassVar[frozenset[int]] = frozenset()
    own_hosts: ClassVar[frozenset[str]] = frozenset()

    def on_headers_complete(self) -> None:
        host = next((value for name, value in self.headers if name == b"host"), None)
        if host is not None and self.server is not None and self.server[1] in self.local_ports:
            name = host_of(f"//{host.decode('latin-1')}")
            if name not in self.own_hosts and not is_loopback(name):
                self._stop(_foreign(name))
        super().on_headers_complete()


def host_of(url: str) -> str:
    """The host of a URL in lower case, without port and final dot; empty if there is none."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether a name or an address is of loopback by itself, without asking a resolver (RFC 6761)."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def own_hosts(host: str, origins: Sequence[str]) -> frozenset[str]:
    """The hosts that the configuration names: ``server.host`` and those of ``server.cors_origins``."""
    return frozenset({host.lower(), *map(host_of, origins)} - {""})


def _foreign(name: str) -> PublicError:
    return PublicError(
        403,
        "forbidden",
        f"the header host names '{path_of([name])}' and keys are off; allowed: localhost, a loopback address,"
        " server.host, the hosts of server.cors_origins",
        param="host",
    )
