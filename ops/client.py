"""A client of a gateway's operator API, with the standard library only."""

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NoReturn, cast
from urllib.parse import quote, urlencode, urlsplit

Body = bytes | Iterable[bytes] | None
PIECE_BYTES = 64 * 1024
DEFAULT_URL = "http://127.0.0.1:8000"
# Longer than the gateway waits for its database (30 s for the ledger, and 2 s to end the connection), so that
# the command shows the gateway's own error.
TIMEOUT_S = 40.0
MAX_ANSWER_BYTES = 64 << 20  # longest answer that is read; a preview has a whole prompt twice


class AdminError(Exception):
    """The gateway cannot be reached or has refused the call; the message is ready to print."""


class GatewayAway(AdminError):
    """No gateway answers, or only with a status of 500 and more, as during a restart."""


@dataclass(frozen=True, slots=True)
class AdminClient:
    """Calls a gateway's operator API, or a worker; ``kind`` is its name in messages."""

    url: str
    key: str | None = None
    timeout_s: float = TIMEOUT_S
    kind: str = "gateway"

    def get(
        self, *path: str, query: Mapping[str, str | int] | None = None, accept: Collection[int] = ()
    ) -> Any:
        """The JSON at a path, whose parts may have any character; ``accept``: error statuses with an answer.

        Raises AdminError, like all methods.
        """
        return self._json("GET", path, query=query, accept=accept)

    def text(self, *path: str) -> str:
        return self._call("GET", path).decode("utf-8", errors="replace")

    def post(
        self, *path: str, body: bytes | Mapping[str, Any], headers: Mapping[str, str] = MappingProxyType({})
    ) -> Any:
        """The JSON answer to ``body``, which is JSON or becomes it."""
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._json("POST", path, sent, headers=headers)

    def put(self, *path: str, body: Mapping[str, Any]) -> Any:
        return self._json("PUT", path, json.dumps(body).encode())

    def patch(self, *path: str, body: Mapping[str, Any]) -> Any:
        return self._json("PATCH", path, json.dumps(body).encode())

    def delete(self, *path: str, status: int) -> None:
        """Delete what is at a path; ``status`` is the gateway's, since another server answers 200."""
        self._call("DELETE", path, status=status)

    def upload(
        self,
        *path: str,
        file: Path,
        fields: Mapping[str, str],
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> Any:
        """Post a form with a file, which is read while it is sent; returns the JSON answer."""
        boundary = f"sluice{os.urandom(12).hex()}"
        head = "".join(
            f'--{boundary}\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
            for name, value in fields.items()
        )
        disposition = f'form-data; name="file"; filename="{quote(file.name)}"'
        head += f"--{boundary}\r\ncontent-disposition: {disposition}\r\n\r\n"
        tail = f"\r\n--{boundary}--\r\n"
        try:
            with file.open("rb") as source:
                pieces = chain(
                    (head.encode(),), iter(partial(source.read, PIECE_BYTES), b""), (tail.encode(),)
                )
                size = len(head) + os.fstat(source.fileno()).st_size + len(tail)
                form = {
                    "content-type": f"multipart/form-data; boundary={boundary}",
                    "content-length": str(size),
                }
                return self._json("POST", path, pieces, headers={**headers, **form})
        except OSError as error:
            raise AdminError(f"{file}: {error.strerror}") from None

    def pieces(self, *path: str) -> Iterator[bytes]:
        """The content of a path, in pieces as they arrive."""
        with self._opened("GET", path) as answer:
            yield from iter(partial(answer.read, PIECE_BYTES), b"")

    def _json(self, method: str, path: Sequence[str], body: Body = None, **options: Any) -> Any:
        """The answer, which is a JSON object at every path that is called."""
        try:
            text = self._call(method, path, body, **options)
            answer = json.loads(text, object_hook=partial(JsonAnswer, source=self))
        except ValueError:
            fault = f"the answer is not JSON; is the {self.kind} running there?"
            raise AdminError(f"{self.url}: {fault}") from None
        if not isinstance(answer, dict):
            fault = f"the answer is not a JSON object; is the {self.kind} running there?"
            raise AdminError(f"{self.url}: {fault}")
        return answer

    def _call(self, method: str, path: Sequence[str], body: Body = None, **options: Any) -> bytes:
        with self._opened(method, path, body, **options) as answer:
            text: bytes = answer.read(MAX_ANSWER_BYTES)
            return text

    @contextmanager
    def _opened(
        self,
        method: str,
        path: Sequence[str],
        body: Body = None,
        query: Mapping[str, str | int] | None = None,
        accept: Collection[int] = (),
        headers: Mapping[str, str] = MappingProxyType({}),
        status: int | None = None,
    ) -> Iterator[BinaryIO]:
        if not self.url.startswith(("http://", "https://")):
            raise AdminError(f"--url: {self.url!r} is not a gateway's address; allowed: http://HOST:PORT")
        place = "/".join(quote(part, safe="") for part in path) + (f"?{urlencode(query)}" if query else "")
        request = urllib.request.Request(f"{self.url.rstrip('/')}/{place}", data=body, method=method)
        for name, value in {"content-type": "application/json", **headers}.items():
            request.add_header(name, value)
        if self.key:
            if self.key != self.key.strip() or not (self.key.isascii() and self.key.isprintable()):
                raise AdminError(
                    "the key has white space at an end, or a character that is not printable ASCII"
                    " (a line end?)"
                )
            request.add_header("authorization", f"Bearer {self.key}")
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                if status not in (None, answer.status):
                    fault = f"the answer is {answer.status}, not {status}; is the {self.kind} running there?"
                    raise AdminError(f"{self.url}: {fault}")
                yield answer
                if answer.length:  # reads of a given size do not fail at an early end
                    raise http.client.IncompleteRead(b"", answer.length)
        except urllib.error.HTTPError as error:
            if error.code not in accept:
                raise (GatewayAway if error.code >= 500 else AdminError)(self._reported(error)) from None
            yield cast("BinaryIO", error)
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            fault = f"no answer ({reason}); is the {self.kind} running there?"
            raise GatewayAway(f"{self.url}: {fault}{_through_proxy(self.url)}") from None
        except http.client.HTTPException as error:
            raise GatewayAway(
                f"{self.url}: the answer is cut off or not HTTP ({type(error).__name__}); "
                f"is the {self.kind} running there?"
            ) from None

    def _reported(self, error: urllib.error.HTTPError) -> str:
        """The gateway's error message, or the status of another server's error and where it came from."""
        try:
            reported = json.loads(error.read(MAX_ANSWER_BYTES))["error"]
            return f"{error.code} {reported['code']}: {reported['message']}"
        except (OSError, ValueError, KeyError, TypeError):
            return f"{self.url}: {error.code} {error.reason}; is the {self.kind} running there?"


class JsonAnswer(dict[str, Any]):
    """A JSON object of a server's answer. A key that it lacks raises AdminError, not KeyError."""

    def __init__(self, content: Mapping[str, Any], *, source: AdminClient) -> None:
        super().__init__(content)
        self._source = source

    def __missing__(self, key: str) -> NoReturn:
        raise AdminError(no_gateways_answer(self._source.url, key, kind=self._source.kind))


def no_gateways_answer(url: str, *keys: str, kind: str = "gateway") -> str:
    """The message for an answer with none of ``keys``."""
    lacks = " and no ".join(map(repr, keys))
    return f"{url}: the answer has no {lacks}; is the {kind} running there, in the version of this command?"


def reach_loopback() -> None:
    """Let this process and its children reach 127.0.0.1 itself, not the environment's proxy."""
    around = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    os.environ["no_proxy"] = f"{around},127.0.0.1" if around else "127.0.0.1"


def _through_proxy(url: str) -> str:
    """A hint if the environment's proxy was asked instead of the gateway; without its address, a secret."""
    parts = urlsplit(url)
    if parts.scheme not in urllib.request.getproxies() or urllib.request.proxy_bypass(parts.netloc):
        return ""
    name = f"{parts.scheme}_proxy".upper()
    return f" It was asked through the proxy of {name}; NO_PROXY={parts.hostname} goes around it"
