"""The expected content of a file, and its check.

The check uses the first that exists of: a manifest in the same prefix (``SHA256SUMS``, ``<name>.sha256``),
the checksum that S3 stores for the whole object, the ETag (an MD5, or for a multipart upload the MD5 of the
parts' MD5s), the size.
"""

import base64
import hashlib
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

READ_BYTES = 1 << 20
_LINE = re.compile(r"\\?(?P<digest>[0-9a-fA-F]{64})[ \t]+\*?(?P<name>\S.*)")
_BARE = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class Expected:
    """The content that a file must have.

    ``kind`` is ``sha256``, ``sha1``, ``md5``, ``crc32``, ``multipart-md5`` or ``size``; ``value`` is the hex
    digest. For ``multipart-md5`` it ends in ``-<parts>``, and each part but the last has ``part_bytes``.
    """

    kind: str
    value: str
    size: int
    part_bytes: int = 0


def fault(path: Path, expected: Expected, stop: Callable[[], None]) -> str | None:
    """Return what is wrong with the file; ``None`` if it is as expected. ``stop`` is called between chunks
    and may raise."""
    size = path.stat().st_size
    if size != expected.size:
        return f"{size} bytes instead of {expected.size}"
    if expected.kind == "size":
        return None
    found = _digest(path, expected, stop)
    if found == expected.value.lower():
        return None
    return f"its {expected.kind} is {found}, expected {expected.value.lower()}"


def _digest(path: Path, expected: Expected, stop: Callable[[], None]) -> str:
    with path.open("rb") as file:

        def chunks(left: int) -> Iterator[bytes]:
            while left and (chunk := file.read(min(READ_BYTES, left))):
                stop()
                left -= len(chunk)
                yield chunk

        if expected.kind == "crc32":
            crc = 0
            for chunk in chunks(expected.size):
                crc = zlib.crc32(chunk, crc)
            return f"{crc:08x}"
        if expected.kind == "multipart-md5":
            digests = []
            for start in range(0, expected.size, expected.part_bytes):
                part = hashlib.md5(usedforsecurity=False)
                for chunk in chunks(min(expected.part_bytes, expected.size - start)):
                    part.update(chunk)
                digests.append(part.digest())
            whole = hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()
            return f"{whole}-{len(digests)}"
        digest = hashlib.new(expected.kind, usedforsecurity=False)
        for chunk in chunks(expected.size):
            digest.update(chunk)
        return digest.hexdigest()


def read_manifest(name: str, text: str) -> Mapping[str, str]:
    """Read SHA-256 digests by file name from ``SHA256SUMS`` or ``<file>.sha256``, relative to its folder."""
    folder, _, base = name.rpartition("/")
    below = f"{folder}/" if folder else ""
    single = base.removesuffix(".sha256") if base.endswith(".sha256") else None
    sums: dict[str, str] = {}
    for line in text.splitlines():
        line = line.strip()
        if single is not None and _BARE.fullmatch(line):
            sums[below + single] = line.lower()
        elif found := _LINE.fullmatch(line):
            sums[below + found["name"].removeprefix("./")] = found["digest"].lower()
    return sums


def is_manifest(name: str) -> bool:
    base = name.rpartition("/")[2]
    return base == "SHA256SUMS" or base.endswith(".sha256")


def from_head(head: Mapping[str, object], size: int, part_bytes: Callable[[], int | None]) -> Expected:
    """Return the expected content of an object from HeadObject with ``ChecksumMode``; ``part_bytes`` returns
    the size of its first part, if known."""
    etag = str(head.get("ETag", "")).strip('"').lower()
    whole = head.get("ChecksumType", "COMPOSITE" if "-" in etag else "FULL_OBJECT") == "FULL_OBJECT"
    for kind, field in (("sha256", "ChecksumSHA256"), ("sha1", "ChecksumSHA1"), ("crc32", "ChecksumCRC32")):
        value = head.get(field)
        if whole and isinstance(value, str) and "-" not in value:
            return Expected(kind, base64.b64decode(value).hex(), size)
    # With encryption by KMS or a customer's key, the ETag is not a digest of the content.
    if str(head.get("ServerSideEncryption", "AES256")) != "AES256" or head.get("SSECustomerAlgorithm"):
        return Expected("size", "", size)
    if re.fullmatch(r"[0-9a-f]{32}", etag):
        return Expected("md5", etag, size)
    if multipart := re.fullmatch(r"[0-9a-f]{32}-(\d+)", etag):
        each = part_bytes()
        # Parts of unequal sizes are allowed; then the ETag cannot be recomputed without all their sizes.
        if each and -(-size // each) == int(multipart[1]):
            return Expected("multipart-md5", etag, size, each)
    return Expected("size", "", size)
