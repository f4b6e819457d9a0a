"""The operators' commands speak to a running gateway through this; the standard library is enough."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 30.0
# Longest answer that is read: a preview shows a whole prompt twice.
MAX_ANSWER_BYTES = 64 << 20

Url = Annotated[str, typer.Option("--url", envvar="SLUICE_URL", show_envvar=True, help="The gateway.")]
Key = Annotated[
    str | None,
    typer.Option(
        "--key",
        envvar="SLUICE_ADMIN_KEY",
        show_envvar=True,
        help="An operator's or admin's key, if keys are on.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the gateway's answer as JSON.")]


class AdminError(Exception):
    """The gateway cannot be reached or has refused; the message is ready to print."""


@dataclass(frozen=True, slots=True)
class AdminClient:
    """Calls a gateway's operators' paths."""

    url: str
    key: str | None = None
    timeout_s: float = TIMEOUT_S

    def get(self, *path: str, query: Mapping[str, str | int] | None = None) -> Any:
        """The JSON at a path, whose parts may hold any character. Raises AdminError."""
        asked = f"?{urlencode(query)}" if query else ""
        return self._call("/".join(quote(part, safe="") for part in path) + asked, None)

    def post(self, *path: str, body: bytes) -> Any:
        """The JSON answer to a JSON body. Raises AdminError."""
        return self._call("/".join(quote(part, safe="") for part in path), body)

    def put(self, *path: str, body: bytes) -> Any:
        """The JSON answer to a JSON body that replaces what is there. Raises AdminError."""
        return self._call("/".join(quote(part, safe="") for part in path), body, method="PUT")

    def delete(self, *path: str) -> None:
        """Have what is at a path taken away. Raises AdminError."""
        self._call("/".join(quote(part, safe="") for part in path), None, method="DELETE")

    def _call(self, path: str, body: bytes | None, method: str | None = None) -> Any:
        if not self.url.startswith(("http://", "https://")):
            raise AdminError(f"--url: {self.url!r} is not a gateway's address; allowed: http://HOST:PORT")
        request = urllib.request.Request(f"{self.url.rstrip('/')}/{path}", data=body, method=method)
        request.add_header("content-type", "application/json")
        if self.key:
            request.add_header("authorization", f"Bearer {self.key}")
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                text = answer.read(MAX_ANSWER_BYTES)
                return None if answer.status == 204 else json.loads(text)
        except urllib.error.HTTPError as error:
            raise AdminError(_told(error)) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise AdminError(f"{self.url}: no answer ({reason}); is the gateway running there?") from None


def _told(error: urllib.error.HTTPError) -> str:
    """The gateway's own words where there are any."""
    try:
        reported = json.loads(error.read(MAX_ANSWER_BYTES))["error"]
        return f"{error.code} {reported['code']}: {reported['message']}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"
