"""Files encrypted at rest."""

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
_PURPOSE: Final = b"sluice: files, AES-256-GCM"


class AesCipher:
    """Encrypts with the first key and decrypts with any, so that a key is replaced without a break."""

    overhead: Final = NONCE_BYTES + TAG_BYTES

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._ciphers = [AESGCM(hmac.digest(key, _PURPOSE, hashlib.sha256)) for key in keys]

    def encrypt(self, file_id: str, number: int, piece: bytes) -> bytes:
        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce + self._ciphers[0].encrypt(nonce, piece, _bound_to(file_id, number))

    def decrypt(self, file_id: str, number: int, piece: bytes) -> bytes:
        for cipher in self._ciphers:
            try:
                return cipher.decrypt(piece[:NONCE_BYTES], piece[NONCE_BYTES:], _bound_to(file_id, number))
            except (InvalidTag, ValueError):  # the latter: less than a nonce is left of the piece
                continue
        raise OSError(f"{file_id} cannot be decrypted: it is damaged, or its key is not given")


def _bound_to(file_id: str, number: int) -> bytes:
    return b"%s:%d" % (file_id.encode(), number)
