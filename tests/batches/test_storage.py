"""Contents of files: whole, in parts, encrypted."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.batches.encryption import AesCipher
from gateway.batches.storage import CHUNK_BYTES, LocalFiles

OLD, NEW = b"o" * 32, b"n" * 32
CONTENT = bytes(range(256)) * 1000


def test_a_file_is_private_and_is_never_half_there(tmp_path: Path) -> None:
    class Breaks(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell():
                raise OSError("the disk is full")
            return super().read(size)

    files = LocalFiles(tmp_path / "files")
    files.put("file-ab", io.BytesIO(b"first"))
    with pytest.raises(OSError, match="full"):
        files.put("file-ab", Breaks(CONTENT))
    assert b"".join(files.chunks("file-ab")) == b"first"
    [path] = [one for one in (tmp_path / "files").rglob("*") if one.is_file()]
    assert path.stat().st_mode & 0o777 == 0o600
    files.delete("file-ab")
    files.delete("file-ab")
    with pytest.raises(FileNotFoundError):
        list(files.chunks("file-ab"))


@pytest.mark.parametrize("keys", [None, [NEW]])
@given(
    start=st.integers(0, len(CONTENT) + 9),
    size=st.one_of(st.none(), st.integers(0, 3 * CHUNK_BYTES)),
)
def test_every_part_can_be_read(
    tmp_path_factory: pytest.TempPathFactory, keys: list[bytes] | None, start: int, size: int | None
) -> None:
    files = LocalFiles(tmp_path_factory.getbasetemp(), AesCipher(keys) if keys else None)
    name = f"file-{'x' if keys else 'y'}1"
    if not files._path(name).exists():
        files.put(name, io.BytesIO(CONTENT))
    end = None if size is None else start + size
    assert b"".join(files.chunks(name, start, size)) == CONTENT[start:end]


def test_an_encrypted_file_shows_nothing_and_keys_are_replaced(tmp_path: Path) -> None:
    LocalFiles(tmp_path, AesCipher([OLD])).put("file-ab", io.BytesIO(b"secret " * 9))
    LocalFiles(tmp_path, AesCipher([OLD])).put("file-cd", io.BytesIO(b"another " * 9))
    raw = (tmp_path / "ab" / "file-ab").read_bytes()
    assert b"secret" not in raw
    assert b"".join(LocalFiles(tmp_path, AesCipher([NEW, OLD])).chunks("file-ab")) == b"secret " * 9
    with pytest.raises(OSError, match="cannot be decrypted"):
        list(LocalFiles(tmp_path, AesCipher([NEW])).chunks("file-ab"))
    (tmp_path / "cd" / "file-cd").write_bytes(raw)  # bound to its id
    with pytest.raises(OSError, match="cannot be decrypted"):
        list(LocalFiles(tmp_path, AesCipher([OLD])).chunks("file-cd"))
