"""A model hub on this machine: the paths that huggingface_hub asks for, and no more."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """The hub's models by id; ``asked`` holds the paths of the requests."""

    url: str = ""
    models: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self.do_GET(body=False)

    def do_GET(self, body: bool = True) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            repo, rest = "/".join(parts[2:4]), parts[4:]
        else:
            repo, rest = "/".join(parts[:2]), parts[2:]
        files = self.hub.models.get(repo)
        if files is None:
            return self._refuse(401, "RepoNotFound")
        if repo in self.hub.gated:
            return self._refuse(403, "GatedRepo")
        if parts[0] == "api" and rest[:1] == ["tree"]:
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            return self._send(json.dumps(tree).encode(), {"Content-Type": "application/json"}, body)
        if parts[0] == "api":
            if rest[1:] not in ([], ["main"], [COMMIT]):
                return self._refuse(404, "RevisionNotFound")
            info = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            return self._send(json.dumps(info).encode(), {"Content-Type": "application/json"}, body)
        data = files.get("/".join(rest[2:]))
        if data is None:
            return self._refuse(404, "EntryNotFound")
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        return self._send(data, headers, body)

    def _send(self, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: requests are recorded in ``asked``."""


@contextlib.contextmanager
def hub() -> Iterator[Hub]:
    """Run a hub while the block runs."""
    state = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": state}))
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
