"""Sessions of the console: a key is exchanged for a cookie that expires after eight hours."""

import hashlib
import hmac
from collections.abc import Callable
from typing import Final

from gateway.contracts.values import Caller
from gateway.errors import InvalidKey

COOKIE: Final = "sluice_console"
SESSION_S: Final = 8 * 3_600
_PURPOSE: Final = b"sluice: sessions of the console"


class ConsoleSessions:
    """Signs session tokens; they are not stored, so every gateway with the secret accepts them.

    A session has the current rights of its key, and ends with the key.

    Args:
        secret: the admin key, which the gateways of a fleet share.
        by_id: returns the caller of a key's id; raises InvalidKey.
    """

    def __init__(self, secret: bytes, by_id: Callable[[str], Caller], unix_time: Callable[[], float]) -> None:
        self._secret = hmac.digest(secret, _PURPOSE, hashlib.sha256)
        self._by_id = by_id
        self._unix_time = unix_time

    def issue(self, key_id: str) -> str:
        text = f"{key_id}.{int(self._unix_time()) + SESSION_S}"
        return f"{text}.{self._signature(text)}"

    def caller(self, token: str) -> Caller:
        """Return the caller of a session. Raises InvalidKey."""
        text, _, signature = token.rpartition(".")
        if not hmac.compare_digest(self._signature(text).encode(), signature.encode()):
            raise InvalidKey("the session is not known here; sign in again")
        key_id, _, until = text.rpartition(".")
        if self._unix_time() >= int(until):
            raise InvalidKey("the session has ended; sign in again")
        return self._by_id(key_id)

    def _signature(self, text: str) -> str:
        return hmac.digest(self._secret, text.encode(), hashlib.sha256).hex()
