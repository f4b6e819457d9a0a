"""Determines which paths each port serves if operators have a separate port."""

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http.path_labels import MONITORS

_ADMIN = ("/admin", "/console")
# Paths that describe the gateway: they show names of routes, backends, adapters and tenants.
_DESCRIBING = ("/metrics", "/openapi.json", "/docs")

Shown = Callable[[str], bool]


def everything(path: str) -> bool:
    return True


def nothing(path: str) -> bool:
    return False


def without_admin(path: str) -> bool:
    return not path.startswith(_ADMIN)


def for_callers(path: str) -> bool:
    """All paths but the operators' and those that describe the gateway."""
    return not path.startswith((*_ADMIN, *_DESCRIBING))


def for_operators(path: str) -> bool:
    """The operators' paths, those that describe the gateway, and the monitors', which both ports serve."""
    return path.startswith((*_ADMIN, *_DESCRIBING)) or path in MONITORS


class ByPort:
    """Two applications on two ports of one server; they drain together.

    The port that accepted the connection selects the application; no header can change that.
    """

    def __init__(self, public: ASGIApp, admin: ASGIApp, *, admin_port: int) -> None:
        self._public = public
        self._admin = admin
        self._port = admin_port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server = scope.get("server")
        app = self._admin if server is not None and server[1] == self._port else self._public
        await app(scope, receive, send)
