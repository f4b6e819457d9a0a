"""Encryption with the operator's keys: of batch files, and of reasoning that clients send back."""

import base64
import hashlib
import hmac
import secrets
from collections.abc import Sequence
from typing import Final

import orjson
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

NONCE_BYTES: Final = 12  # the standard nonce length of AES-GCM; random nonces are safe for 2^32 texts per key
TAG_BYTES: Final = 16
_VERSION: Final = b"\x01"


class AesCipher:
    """Encrypts with the first key and decrypts with any, so that keys can be rotated without interruption.

    Each ``purpose`` has its own keys, derived from the operator's.
    """

    overhead: Final = NONCE_BYTES + TAG_BYTES

    def __init__(self, keys: Sequence[bytes], purpose: str) -> None:
        derived = f"sluice: {purpose}, AES-256-GCM".encode()
        self._ciphers = [AESGCM(hmac.digest(key, derived, hashlib.sha256)) for key in keys]

    def encrypt(self, data: bytes, bound_to: bytes) -> bytes:
        """Encrypt data; the result starts with the nonce. ``bound_to`` is authenticated with it."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce + self._ciphers[0].encrypt(nonce, data, bound_to)

    def decrypt(self, data: bytes, bound_to: bytes) -> bytes | None:
        """Decrypt data; ``None`` if it is damaged, bound to something else, or its key is unknown."""
        for cipher in self._ciphers:
            try:
                return cipher.decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], bound_to)
            except (InvalidTag, ValueError):  # ValueError: the data is shorter than a nonce
                continue
        return None


class AesReasoningSeal:
    """Encrypts reasoning for clients. An encrypted text is bound to its tenant and model."""

    def __init__(self, cipher: AesCipher) -> None:
        self._cipher = cipher

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
