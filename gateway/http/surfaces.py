"""Determines which paths each port serves if operators have a separate port."""

from collections.abc import Awaitable, Callable

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


def by_port(public: ASGIApp, admin: ASGIApp, *, admin_port: int) -> ASGIApp:
    """Two applications on two ports of one server; they drain together.

    The port that accepted the connection selects the application; no header can change that.
    """

    def selected(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        server = scope.get("server")
        app = admin if server is not None and server[1] == admin_port else public
        return app(scope, receive, send)

    return selected
