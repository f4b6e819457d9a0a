"""Contents of files in a bucket."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast

from gateway.batches.storage import CHUNK_BYTES, FILE_ID, Pieces
from gateway.weights.location import S3Prefix

if TYPE_CHECKING:
    from gateway.keys.sealing import AesCipher

PART_BYTES: Final = 8 << 20  # size of a part of a multipart upload; one part at a time is in memory
_NOT_THERE: Final = frozenset({"404", "NoSuchKey", "NotFound"})


class S3Files:
    """Contents as objects below a prefix. An object is stored completely or not at all.

    ``client`` is boto3's, which is thread-safe.
    """

    def __init__(self, client: Any, prefix: S3Prefix, cipher: AesCipher | None = None) -> None:
        self._client = client
        self._prefix = prefix
        self._pieces = Pieces(cipher)

    def put(self, file_id: str, source: BinaryIO) -> None:
        from boto3.s3.transfer import TransferConfig

        pieces = io.BufferedReader(_Stream(self._pieces.stored(file_id, source)))
        config = TransferConfig(
            multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, use_threads=False
        )
        with self._errors(file_id):
            self._client.upload_fileobj(pieces, self._prefix.bucket, self._key(file_id), Config=config)

    def chunks(self, file_id: str, start: int = 0, size: int | None = None) -> Iterator[bytes]:
        """Read a part by one request for the pieces that contain it."""

        def read_from(at: int, end: int | None) -> BinaryIO:
            asked = f"bytes={at}-" if end is None else f"bytes={at}-{end - 1}"
            body: Any = io.BytesIO()
            try:
                body = self._client.get_object(**self._object(file_id), Range=asked)["Body"]
            except Exception as error:  # the client's errors have no common base
                if _code(error) not in ("416", "InvalidRange"):  # the object ends before ``at``
                    raise
            return cast(BinaryIO, io.BufferedReader(_Stream(iter(lambda: body.read(CHUNK_BYTES), b""))))

        with self._errors(file_id):
            yield from self._pieces.part(file_id, start, size, read_from)

    def check_key(self, file_id: str, size: int) -> None:
        def stored_bytes() -> int:
            return int(self._client.head_object(**self._object(file_id))["ContentLength"])

        with self._errors(file_id):
            self._pieces.check_key(file_id, size, stored_bytes)

    def delete(self, file_id: str) -> None:
        """Delete the content, if it is there; S3 does not say whether it was."""
        with self._errors(file_id):
            self._client.delete_object(**self._object(file_id))

    def older_than(self, unix_time: float) -> Iterator[str]:
        with self._errors(self._prefix.url):
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._prefix.bucket, Prefix=self._prefix.start):
                for one in page.get("Contents", ()):
                    file_id = one["Key"].removeprefix(self._prefix.start)
                    if FILE_ID.fullmatch(file_id) and one["LastModified"].timestamp() < unix_time:
                        yield file_id

    def _key(self, file_id: str) -> str:
        return self._prefix.start + file_id

    def _object(self, file_id: str) -> dict[str, str]:
        return {"Bucket": self._prefix.bucket, "Key": self._key(file_id)}

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Raise the client's errors as OSError."""
        try:
            yield
        except OSError:
            raise
        except Exception as error:  # the client's errors have no common base
            if (code := _code(error)) in _NOT_THERE:
                raise FileNotFoundError(f"{what} is not in {self._prefix.url}") from error
            raise OSError(f"{self._prefix.url}: {code or type(error).__name__}") from error


class _Stream(io.RawIOBase):
    """The bytes of an iterator as a stream."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        if not self._left:
            self._left = next(self._pieces, b"")
        view = memoryview(buffer)
        count = min(len(view), len(self._left))
        view[:count], self._left = self._left[:count], self._left[count:]
        return count


def _code(error: Exception) -> str:
    return str(getattr(error, "response", {}).get("Error", {}).get("Code", ""))
