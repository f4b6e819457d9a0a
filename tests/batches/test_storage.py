"""Storage of file contents: whole, in parts, encrypted."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog.testing
from hypothesis import given
from hypothesis import strategies as st
from moto.server import ThreadedMotoServer

from gateway.batches.s3_files import PART_BYTES, S3Files
from gateway.batches.storage import CHUNK_BYTES, LocalFiles
from gateway.config.engine import WeightsSection
from gateway.config.errors import ConfigError
from gateway.config.settings import load_settings
from gateway.keys.sealing import AesCipher
from gateway.weights.location import S3Prefix
from gateway.weights.s3_client import make_client
from gateway.wiring.batches import make_storage
from ops.cli.doctor import files_of_batches

OLD, NEW = b"o" * 32, b"n" * 32
CONTENT = bytes(range(256)) * 1000


def test_an_address_of_other_storage_than_s3_is_not_taken_for_a_folder() -> None:
    with pytest.raises(
        ConfigError, match=r"batches\.folder: gs:// is not known; allowed: a folder, or s3://"
    ):
        load_settings(None, {"SLUICE_BATCHES__FOLDER": "gs://me:hunter2@bucket/files"})


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
    files = LocalFiles(tmp_path_factory.getbasetemp(), AesCipher(keys, "files") if keys else None)
    name = f"file-{'x' if keys else 'y'}1"
    if not files._path(name).exists():
        files.put(name, io.BytesIO(CONTENT))
    end = None if size is None else start + size
    assert b"".join(files.chunks(name, start, size)) == CONTENT[start:end]


def test_an_encrypted_file_shows_nothing_and_keys_are_replaced(tmp_path: Path) -> None:
    LocalFiles(tmp_path, AesCipher([OLD], "files")).put("file-ab", io.BytesIO(b"secret " * 9))
    LocalFiles(tmp_path, AesCipher([OLD], "files")).put("file-cd", io.BytesIO(b"another " * 9))
    raw = (tmp_path / "ab" / "file-ab").read_bytes()
    assert b"secret" not in raw
    assert b"".join(LocalFiles(tmp_path, AesCipher([NEW, OLD], "files")).chunks("file-ab")) == b"secret " * 9
    with pytest.raises(OSError, match="cannot be decrypted"):
        list(LocalFiles(tmp_path, AesCipher([NEW], "files")).chunks("file-ab"))
    (tmp_path / "cd" / "file-cd").write_bytes(raw)  # an encrypted file is bound to its id
    with pytest.raises(OSError, match="cannot be decrypted"):
        list(LocalFiles(tmp_path, AesCipher([OLD], "files")).chunks("file-cd"))


def test_an_encrypted_file_is_told_from_a_plain_one_where_no_key_is_given(tmp_path: Path) -> None:
    keyed, plain = LocalFiles(tmp_path, AesCipher([OLD], "files")), LocalFiles(tmp_path)
    for name, size in (("file-ab", len(CONTENT)), ("file-cd", 1), ("file-ef", 0)):
        keyed.put(name, io.BytesIO(CONTENT[:size]))
        keyed.check_key(name, size)
        if size:
            with pytest.raises(OSError, match=f"{name} cannot be decrypted: its key is not given"):
                plain.check_key(name, size)
        plain.put(name, io.BytesIO(CONTENT[:size]))
        plain.check_key(name, size)
    with pytest.raises(FileNotFoundError):
        plain.check_key("file-00", 1)


@pytest.mark.parametrize("left", [1, 9, 27, 50])
def test_a_damaged_file_cannot_be_decrypted(tmp_path: Path, left: int) -> None:
    files = LocalFiles(tmp_path, AesCipher([NEW], "files"))
    files.put("file-ab", io.BytesIO(b"secret " * 9))
    path = tmp_path / "ab" / "file-ab"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(OSError, match="cannot be decrypted"):
        list(files.chunks("file-ab"))


@pytest.fixture(scope="module")
def bucket() -> Iterator[tuple[Any, S3Prefix]]:
    """A client of a real boto3 and a bucket of a server that speaks S3."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        client = make_client(WeightsSection(endpoint_url=f"http://{host}:{port}", region="us-east-1"))
        client.create_bucket(Bucket="files")
        yield client, S3Prefix("files", "sluice/files")
    server.stop()


@pytest.mark.parametrize("keys", [None, [NEW]])
def test_a_bucket_holds_files_as_a_folder_does(
    bucket: tuple[Any, S3Prefix], keys: list[bytes] | None
) -> None:
    client, prefix = bucket
    files = S3Files(client, prefix, AesCipher(keys, "files") if keys else None)
    long = CONTENT * (PART_BYTES // len(CONTENT) + 1)  # in several parts
    files.put("file-ab", io.BytesIO(b"first"))
    files.put("file-ab", io.BytesIO(long))
    assert b"".join(files.chunks("file-ab")) == long
    edge = CHUNK_BYTES
    for start, size in ((0, 1), (edge - 1, 2), (edge, edge), (3 * edge + 7, 9), (len(long) - 2, 9), (9, 0)):
        assert b"".join(files.chunks("file-ab", start, size)) == long[start : start + size]
    assert b"".join(files.chunks("file-ab", len(long) + 3 * edge, 4)) == b""
    stored = client.get_object(Bucket="files", Key="sluice/files/file-ab")["Body"].read()
    assert (stored == long) == (keys is None)
    files.check_key("file-ab", len(long))
    if keys is not None:
        with pytest.raises(OSError, match="its key is not given"):
            S3Files(client, prefix).check_key("file-ab", len(long))

    others = ("notes.txt", "file-list.csv", "weights/file-ab")
    for name in others:  # other programs' objects under the prefix: the gateway must not delete them
        client.put_object(Bucket="files", Key=f"sluice/files/{name}", Body=b"of others")
    assert list(files.older_than(time.time() + 60)) == ["file-ab"]
    assert list(files.older_than(time.time() - 60)) == []
    files.delete("file-ab")
    files.delete("file-ab")
    with pytest.raises(FileNotFoundError, match="file-ab is not in s3://files/sluice/files"):
        list(files.chunks("file-ab"))
    with pytest.raises(FileNotFoundError, match="file-ab is not in s3://files/sluice/files"):
        S3Files(client, prefix).check_key("file-ab", 5)


def test_errors_of_a_bucket_are_raised_as_os_errors(bucket: tuple[Any, S3Prefix]) -> None:
    client, _ = bucket
    files = S3Files(client, S3Prefix("other", ""))
    with pytest.raises(OSError, match="s3://other: NoSuchBucket"):
        files.put("file-ab", io.BytesIO(b"first"))
    with pytest.raises(OSError, match="s3://other: NoSuchBucket"):
        list(files.chunks("file-ab"))
    with pytest.raises(OSError, match="s3://other: NoSuchBucket"):
        list(files.older_than(time.time()))


def test_files_that_a_killed_process_left_are_found_and_deleted(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    files.put("file-ab", io.BytesIO(b"whole"))
    (tmp_path / "cd").mkdir()
    (tmp_path / "cd" / "file-cd.77.new").write_bytes(b"hal")
    (tmp_path / "cd" / "file-list.csv").write_bytes(b"of others")
    (tmp_path / "cd" / "file-ef").symlink_to(tmp_path / "deleted meanwhile")
    assert sorted(files.older_than(time.time() + 60)) == ["file-ab", "file-cd"]
    assert list(files.older_than(time.time() - 60)) == []
    files.delete("file-cd")
    assert list(files.older_than(time.time() + 60)) == ["file-ab"]


@pytest.mark.parametrize(
    ("folder", "found"), [("new/files", [True]), ("a-file/files", [False]), ("s3://b/p", [])]
)
def test_doctor_says_whether_files_can_be_stored(tmp_path: Path, folder: str, found: list[bool]) -> None:
    (tmp_path / "a-file").write_text("")
    place = folder if "://" in folder else str(tmp_path / folder)
    settings = load_settings(None, {"SLUICE_BATCHES__FOLDER": place})
    assert [check.ok for check in files_of_batches(settings)] == found


@pytest.mark.parametrize(
    ("folder", "ledger", "warned"),
    [
        ("files", "postgresql+asyncpg://me:hunter2@db/sluice", True),
        ("/srv/files", "postgresql+asyncpg://me:hunter2@db/sluice", False),
        ("files", "sqlite+aiosqlite:///state/sluice.db", False),
    ],
)
def test_a_folder_that_other_gateways_on_a_postgresql_may_not_share_is_logged(
    folder: str, ledger: str, warned: bool
) -> None:
    settings = load_settings(None, {"SLUICE_BATCHES__FOLDER": folder, "SLUICE_LEDGER__URL": ledger})
    with structlog.testing.capture_logs() as logs:
        make_storage(SimpleNamespace(settings=settings))
    assert [one["log_level"] for one in logs] == ["warning"] * warned
    assert "hunter2" not in str(logs)
