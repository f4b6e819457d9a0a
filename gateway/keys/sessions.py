"""Sessions of the console: a key in exchange for a cookie that ends soon."""

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
    """Signs tokens; nothing is stored, so every gateway with the secret accepts them.

    A session has the rights that its key has at the moment, and ends with it.

    Args:
        secret: the admin key, which gateways of one fleet share.
        by_id: who has a key; raises InvalidKey.
    """

    def __init__(self, secret: bytes, by_id: Callable[[str], Caller], unix_time: Callable[[], float]) -> None:
        self._secret = hmac.digest(secret, _PURPOSE, hashlib.sha256)
        self._by_id = by_id
        self._unix_time = unix_time

    def issue(self, key_id: str) -> str:
        """A token that is good for :data:`SESSION_S`."""
        text = f"{key_id}.{int(self._unix_time()) + SESSION_S}"
        return f"{text}.{self._signature(text)}"

    def caller(self, token: str) -> Caller:
        """Whose session it is. Raises InvalidKey."""
        text, _, signature = token.rpartition(".")
        if not hmac.compare_digest(self._signature(text).encode(), signature.encode()):
            raise InvalidKey("the session is not known here; sign in again")
        key_id, _, until = text.rpartition(".")
        if self._unix_time() >= int(until):
            raise InvalidKey("the session has ended; sign in again")
        return self._by_id(key_id)

    def _signature(self, text: str) -> str:
        return hmac.digest(self._secret, text.encode(), hashlib.sha256).hex()
