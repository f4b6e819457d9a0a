"""Data sealed with an operator's keys: the files of batches, and reasoning that comes back with a request."""

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
TAG_BYTES: Final = 16
_VERSION: Final = b"\x01"


class AesCipher:
    """Encrypts with the first key and decrypts with any, so that a key is replaced without a break.

    Each ``purpose`` has keys of its own, made of the operator's.
    """

    overhead: Final = NONCE_BYTES + TAG_BYTES

    def __init__(self, keys: Sequence[bytes], purpose: str) -> None:
        derived = f"sluice: {purpose}, AES-256-GCM".encode()
        self._ciphers = [AESGCM(hmac.digest(key, derived, hashlib.sha256)) for key in keys]

    def encrypt(self, data: bytes, bound_to: bytes) -> bytes:
        """The data with its nonce, bound to where it belongs."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce + self._ciphers[0].encrypt(nonce, data, bound_to)

    def decrypt(self, data: bytes, bound_to: bytes) -> bytes | None:
        """The data again; ``None``: it is damaged, of another place, or encrypted with an unknown key."""
        for cipher in self._ciphers:
            try:
                return cipher.decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], bound_to)
            except (InvalidTag, ValueError):  # the latter: less than a nonce is left of it
                continue
        return None


class AesReasoningSeal:
    """Seals reasoning for a client. A sealed text is bound to its tenant and model."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._cipher = AesCipher(keys, "reasoning")

    def seal(self, tenant: str, model: str, text: str) -> str:
        sealed = self._cipher.encrypt(text.encode(), orjson.dumps([tenant, model]))
        return base64.urlsafe_b64encode(_VERSION + sealed).decode()

    def opened(self, tenant: str, model: str, sealed: str) -> str | None:
        try:
            data = base64.b64decode(sealed, altchars=b"-_", validate=True)
        except ValueError:
            return None
        if data[:1] != _VERSION:
            return None
        text = self._cipher.decrypt(data[1:], orjson.dumps([tenant, model]))
        return None if text is None else text.decode()
