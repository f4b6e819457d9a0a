"""The API key that the gateway sends to workers."""

import asyncio
from pathlib import Path

import structlog

# Time between two reads of the key's file, seconds. A service accepts an old key for longer than that.
KEY_RELOAD_S = 5.0
MAX_KEY_BYTES = 16 * 1024


class UnusableKey(Exception):
    """The key is missing, or not allowed in a header. The message does not contain the key."""


class ApiKey:
    """A key, and its ``line``: the ``Authorization`` header line with its CRLF, empty without a key.

    The key of a file is read again when the file changes. Raises UnusableKey.
    """

    def __init__(
        self, key: str | None = None, path: Path | None = None, *, reload_s: float = KEY_RELOAD_S
    ) -> None:
        self._path = path
        self._reload_s = reload_s
        self.line = b"" if key is None else _line(key)
        if path is not None:
            self.line = _line(_read(path))

    async def watch(self) -> None:
        """Read the file periodically until cancelled; with an unusable file the last key stays in use."""
        usable, log = True, structlog.get_logger("gateway.workers")
        while self._path is not None:
            await asyncio.sleep(self._reload_s)
            try:
                line = _line(await asyncio.to_thread(_read, self._path))
            except UnusableKey as error:
                if usable:
                    log.warning("the key in use is kept", error=str(error))
                usable = False
                continue
            if line != self.line:
                log.info("the key was read again", file=str(self._path))
            self.line, usable = line, True


NO_KEY = ApiKey()


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MAX_KEY_BYTES).decode("ascii", "replace").strip()
    except OSError as error:
        raise UnusableKey(f"{path} cannot be read: {error.strerror or type(error).__name__}") from None


def _line(key: str) -> bytes:
    if not key:
        raise UnusableKey("it is empty")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UnusableKey("it has characters that no header may have")
    return f"authorization: Bearer {key}\r\n".encode()
