"""What a single token stands for: bytes, since a character may be spread over several tokens."""

from __future__ import annotations

import json
import re

_BLANK = "\u2581"  # how SentencePiece writes a blank
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """Turns the vocabulary's own strings into the bytes they stand for.

    Byte-level vocabularies write each byte as one printable character; the others write plain text, spaces as
    U+2581, and bytes that are no character of theirs as ``<0xE3>``.
    """

    def __init__(self, tokenizer_json: str) -> None:
        self._bytes = bytes_of_characters() if _is_byte_level(json.loads(tokenizer_json)) else {}

    def of(self, token: str) -> bytes:
        """The bytes of a token that is not a control token."""
        if self._bytes:
            return b"".join([self._bytes.get(character, character.encode()) for character in token])
        byte = _BYTE.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(_BLANK, " ").encode()


def _is_byte_level(tokenizer: object) -> bool:
    """Whether the decoder, or a part of it, is the byte-level one."""
    if not isinstance(tokenizer, dict):
        return False
    decoder = tokenizer.get("decoder") or {}
    return any(part.get("type") == "ByteLevel" for part in (decoder, *decoder.get("decoders", ())))


def bytes_of_characters() -> dict[str, bytes]:
    """Bytes that are printable in Latin-1 stand for themselves, the others for U+0100 and on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): bytes([byte]) for byte in printable}
    return table | {chr(0x100 + place): bytes([byte]) for place, byte in enumerate(others)}
