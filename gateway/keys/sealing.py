"""Reasoning that leaves the gateway sealed, and comes back with the next request."""

import base64
import hashlib
import hmac
import secrets
from collections.abc import Sequence
from typing import Final

import orjson
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

NONCE_BYTES: Final = 12
"""The length that AES-GCM is made for; random ones are safe for 2^32 texts of a key."""
_VERSION: Final = b"\x01"
_PURPOSE: Final = b"sluice: reasoning, AES-256-GCM"


class AesReasoningSeal:
    """Seals with the first key and opens with any, so that a key is replaced without a break.

    A sealed text is bound to its tenant and model: of others it cannot be opened.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._ciphers = [AESGCM(hmac.digest(key, _PURPOSE, hashlib.sha256)) for key in keys]

    def seal(self, tenant: str, model: str, text: str) -> str:
        nonce = secrets.token_bytes(NONCE_BYTES)
        sealed = self._ciphers[0].encrypt(nonce, text.encode(), _bound_to(tenant, model))
        return base64.urlsafe_b64encode(_VERSION + nonce + sealed).decode()

    def opened(self, tenant: str, model: str, sealed: str) -> str | None:
        try:
            data = base64.b64decode(sealed, altchars=b"-_", validate=True)
        except ValueError:
            return None
        nonce, text = data[1 : 1 + NONCE_BYTES], data[1 + NONCE_BYTES :]
        if data[:1] != _VERSION or len(nonce) < NONCE_BYTES:
            return None
        for cipher in self._ciphers:
            try:
                return cipher.decrypt(nonce, text, _bound_to(tenant, model)).decode()
            except InvalidTag:
                continue
        return None


def _bound_to(tenant: str, model: str) -> bytes:
    return orjson.dumps([tenant, model])
