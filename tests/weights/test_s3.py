"""Fetching from S3: ranges, resumption, checksums, two at once, and one clear line for each failure."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError

from gateway.weights.errors import (
    FetchError,
    FetchStopped,
    NotThere,
    UnknownLocation,
    Unreachable,
)
from gateway.weights.location import S3Prefix
from gateway.weights.s3 import S3Fetcher
from gateway.weights.s3_client import meaning
from gateway.weights.values import Progress
from tests import fork_server
from tests.fork_server import ForkedPopen
from tests.weights.conftest import BUCKET, LLAMA
from tests.weights.network_proxy import Proxy

Make = Callable[..., S3Fetcher]
MIB = 1 << 20
ROOT = Path(__file__).parents[2]


def put(s3: Any, name: str, content: bytes) -> bytes:
    s3.put_object(Bucket=BUCKET, Key=f"llama/{name}", Body=content)
    return content


def random_bytes(size: int) -> bytes:
    return os.urandom(size)


def test_a_prefix_arrives_as_a_folder_with_its_subfolders(
    s3: Any, s3_url: str, fetcher_at: Make, tmp_path: Path
) -> None:
    config = put(s3, "config.json", b"{}")
    deep = put(s3, "tokenizer/deep/vocab.txt", b"a\nb")
    empty = put(s3, "empty.txt", b"")
    put(s3, "folder/", b"")
    weights = put(s3, "model.safetensors", random_bytes(20 * MIB))
    progress: list[Progress] = []
    folder = fetcher_at(s3_url).fetch(tmp_path, on_progress=progress.append)
    assert (folder / "config.json").read_bytes() == config
    assert (folder / "tokenizer/deep/vocab.txt").read_bytes() == deep
    assert (folder / "empty.txt").read_bytes() == empty
    assert (folder / "model.safetensors").read_bytes() == weights
    total = len(config) + len(deep) + len(weights)
    assert progress[0] == Progress(0, total) and progress[-1] == Progress(total, total)
    assert [p.done for p in progress] == sorted(p.done for p in progress)


def test_what_is_here_is_not_fetched_again_and_what_changed_is(
    s3: Any, network: Proxy, fetcher_at: Make, tmp_path: Path
) -> None:
    put(s3, "config.json", b"{}")
    put(s3, "model.safetensors", random_bytes(4 * MIB))
    fetcher = fetcher_at(network.url)
    fetcher.fetch(tmp_path)
    network.received, network.ranges = 0, []
    folder = fetcher.fetch(tmp_path)
    assert network.ranges == [] and network.received < MIB
    put(s3, "config.json", b'{"new": 1}')
    assert fetcher.fetch(tmp_path) == folder
    assert (folder / "config.json").read_bytes() == b'{"new": 1}'
    assert len(network.ranges) == 1


def test_the_small_files_come_alone_when_only_they_are_wanted(
    s3: Any, s3_url: str, fetcher_at: Make, tmp_path: Path
) -> None:
    put(s3, "tokenizer.json", b"{}")
    put(s3, "model.safetensors", b"weights")
    folder = fetcher_at(s3_url).fetch(tmp_path, small=True)
    assert (folder / "tokenizer.json").is_file() and not (folder / "model.safetensors").exists()


def test_one_format_of_the_weights_is_enough(s3: Any, s3_url: str, fetcher_at: Make, tmp_path: Path) -> None:
    for name in ("model.safetensors", "pytorch_model.bin", "original/consolidated.00.pth"):
        put(s3, name, b"weights")
    folder = fetcher_at(s3_url).fetch(tmp_path)
    assert [p.name for p in folder.rglob("*") if p.is_file() and ".sluice" not in p.parts] == [
        "model.safetensors"
    ]


def test_a_connection_that_breaks_is_resumed_where_it_ended(
    s3: Any, network: Proxy, fetcher_at: Make, tmp_path: Path
) -> None:
    content = put(s3, "model.safetensors", random_bytes(24 * MIB))
    fetcher = fetcher_at(network.url)
    network.cut_every = 3 * MIB
    folder = fetcher.fetch(tmp_path)
    assert (folder / "model.safetensors").read_bytes() == content
    assert len(network.ranges) > 6, "it was really cut"
    # A cut loses only the bytes in buffers: up to a chunk and those of the sockets, never a range.
    assert network.received < 24 * MIB + len(network.ranges) * 2 * MIB


def fetch_in_a_process(url: str, into: Path) -> subprocess.Popen[str]:
    code = (
        "import sys; from pathlib import Path; from gateway.weights.s3 import S3Fetcher; "
        "from gateway.config.engine import WeightsSection; from gateway.weights.location import S3Prefix; "
        f"fetcher = S3Fetcher({LLAMA!r}, WeightsSection(endpoint_url={url!r}, connections=4)); "
        f"print(fetcher.fetch(Path({str(into)!r})))"
    )
    return ForkedPopen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_fetch_that_was_killed_is_resumed_without_fetching_twice(
    s3: Any, network: Proxy, fetcher_at: Make, tmp_path: Path
) -> None:
    size = 32 * MIB
    content = put(s3, "model.safetensors", random_bytes(size))
    network.hold_at = size // 2
    child = fetch_in_a_process(network.url, tmp_path)
    deadline = time.monotonic() + 60
    while network.received < size // 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)  # bytes in the socket buffers reach the disk
    child.send_signal(signal.SIGKILL)
    child.communicate()
    first = network.received
    network.hold_at, network.received = None, 0
    progress: list[Progress] = []
    folder = fetcher_at(network.url).fetch(tmp_path, on_progress=progress.append)
    assert (folder / "model.safetensors").read_bytes() == content
    # At most the bytes in flight are lost: a chunk and the sockets' buffers for each of the 4 connections.
    assert size // 2 <= first < size
    assert first + network.received < size + 4 * 3 * MIB
    assert progress[1].done > size // 4, "the progress begins with what was here"


def test_two_processes_at_once_fetch_each_file_once(s3: Any, network: Proxy, tmp_path: Path) -> None:
    sizes = {f"model-{i}.safetensors": 6 * MIB for i in range(4)}
    contents = {name: put(s3, name, random_bytes(size)) for name, size in sizes.items()}
    put(s3, "config.json", b"{}")
    network.rate = 24 * MIB
    children = [fetch_in_a_process(network.url, tmp_path) for _ in range(2)]
    folders = {child.communicate(timeout=100)[0].strip() for child in children}
    assert [child.returncode for child in children] == [0, 0] and len(folders) == 1
    folder = Path(folders.pop())
    assert all((folder / name).read_bytes() == content for name, content in contents.items())
    assert network.received < sum(sizes.values()) + MIB


def test_threads_of_a_process_share_a_fetch(
    s3: Any, network: Proxy, fetcher_at: Make, tmp_path: Path
) -> None:
    put(s3, "model.safetensors", random_bytes(8 * MIB))
    network.rate = 32 * MIB
    with ThreadPoolExecutor(3) as pool:
        folders = list(pool.map(lambda _: fetcher_at(network.url).fetch(tmp_path), range(3)))
    assert len(set(folders)) == 1 and network.received < 9 * MIB


def test_a_stop_ends_a_fetch_soon_and_keeps_the_bytes_that_arrived(
    s3: Any, network: Proxy, fetcher_at: Make, tmp_path: Path
) -> None:
    put(s3, "model.safetensors", random_bytes(32 * MIB))
    network.rate = 8 * MIB
    stop = threading.Event()

    def watch(progress: Progress) -> None:
        if progress.done > 8 * MIB:
            stop.set()

    began = time.monotonic()
    with pytest.raises(FetchStopped):
        fetcher_at(network.url).fetch(tmp_path, on_progress=watch, stop=stop)
    assert time.monotonic() - began < 10
    progress: list[Progress] = []
    network.rate = None
    fetcher_at(network.url).fetch(tmp_path, on_progress=progress.append)
    assert progress[1].done >= 8 * MIB


# Checksums.


def multipart(s3: Any, name: str, content: bytes) -> None:
    config = TransferConfig(multipart_threshold=5 * MIB, multipart_chunksize=5 * MIB)
    s3.upload_fileobj(io.BytesIO(content), BUCKET, f"llama/{name}", Config=config)


@pytest.mark.parametrize("upload", [put, multipart])
def test_content_that_is_corrupted_twice_is_an_error(
    s3: Any, network: Proxy, fetcher_at: Make, tmp_path: Path, upload: Callable[[Any, str, bytes], object]
) -> None:
    upload(s3, "model.safetensors", random_bytes(12 * MIB))
    network.corrupt = True
    with pytest.raises(FetchError, match=r"model\.safetensors: its \S+ is .*, expected .*, twice"):
        fetcher_at(network.url).fetch(tmp_path)
    assert network.received > 24 * MIB, "it was fetched a second time"
    assert not list(tmp_path.rglob("*.safetensors"))


def test_content_that_is_corrupted_once_is_fetched_again(
    s3: Any, network: Proxy, fetcher_at: Make, tmp_path: Path
) -> None:
    content = put(s3, "model.safetensors", random_bytes(4 * MIB))
    network.corrupt = True

    def repair_the_network(progress: Progress) -> None:
        if progress.done == progress.total:
            network.corrupt = False

    folder = fetcher_at(network.url).fetch(tmp_path, on_progress=repair_the_network)
    assert (folder / "model.safetensors").read_bytes() == content
    assert network.received > 8 * MIB


def test_a_multipart_upload_is_checked_by_its_etag(
    s3: Any, s3_url: str, fetcher_at: Make, tmp_path: Path
) -> None:
    content = random_bytes(12 * MIB)
    multipart(s3, "model.safetensors", content)
    folder = fetcher_at(s3_url).fetch(tmp_path)
    assert (folder / "model.safetensors").read_bytes() == content
    record = (folder / ".sluice/files/model.safetensors.json").read_text()
    assert '"checked_by": "multipart-md5"' in record


@pytest.mark.parametrize("manifest", ["SHA256SUMS", "model.safetensors.sha256"])
def test_a_manifest_in_the_prefix_wins(
    s3: Any, s3_url: str, fetcher_at: Make, tmp_path: Path, manifest: str
) -> None:
    content = put(s3, "model.safetensors", random_bytes(MIB))
    put(s3, manifest, f"{hashlib.sha256(content).hexdigest()}  model.safetensors\n".encode())
    folder = fetcher_at(s3_url).fetch(tmp_path / "good")
    assert '"checked_by": "sha256"' in (folder / ".sluice/files/model.safetensors.json").read_text()
    put(s3, manifest, f"{'0' * 64}  model.safetensors\n".encode())
    with pytest.raises(FetchError, match=r"its sha256 is .*, expected 0000"):
        fetcher_at(s3_url).fetch(tmp_path / "bad")


def test_a_part_of_another_version_is_discarded(
    s3: Any, network: Proxy, fetcher_at: Make, tmp_path: Path
) -> None:
    put(s3, "model.safetensors", random_bytes(16 * MIB))
    network.rate = 8 * MIB
    stop = threading.Event()
    with pytest.raises(FetchStopped):
        fetcher_at(network.url).fetch(
            tmp_path, on_progress=lambda p: stop.set() if p.done > 4 * MIB else None, stop=stop
        )
    network.rate = None
    content = put(s3, "model.safetensors", random_bytes(16 * MIB))
    folder = fetcher_at(network.url).fetch(tmp_path)
    assert (folder / "model.safetensors").read_bytes() == content


def test_a_file_put_there_by_hand_is_checked_and_kept(
    s3: Any, network: Proxy, fetcher_at: Make, tmp_path: Path
) -> None:
    content = put(s3, "model.safetensors", random_bytes(4 * MIB))
    put(s3, "other.safetensors", random_bytes(4 * MIB))
    fetcher = fetcher_at(network.url)
    folder = fetcher.folder(tmp_path)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(content)
    (folder / "other.safetensors").write_bytes(random_bytes(4 * MIB))
    fetcher.fetch(tmp_path)
    assert 4 * MIB < network.received < 5 * MIB


# Failures, one line each.


def failure(make: Callable[[], object], kind: type[FetchError]) -> str:
    with pytest.raises(kind) as caught:
        make()
    assert type(caught.value) is kind and "\n" not in str(caught.value)
    return str(caught.value)


def test_a_bucket_or_prefix_that_is_not_there_is_named(
    s3: Any, s3_url: str, fetcher_at: Make, tmp_path: Path
) -> None:
    for prefix, named in (
        (S3Prefix(BUCKET, "nothing"), "s3://models/nothing"),
        (S3Prefix("no-such-bucket", "x"), "NoSuchBucket"),
    ):
        fetcher = fetcher_at(s3_url, prefix=prefix)
        assert named in failure(lambda fetcher=fetcher: fetcher.fetch(tmp_path), NotThere)
    fetcher = fetcher_at(s3_url)
    put(s3, "model.safetensors", b"x")
    failure(lambda: fetcher.fetch(tmp_path, small=True), NotThere)


def test_a_key_that_vanishes_or_changes_during_the_fetch_is_an_error(
    s3: Any, network: Proxy, fetcher_at: Make, tmp_path: Path
) -> None:
    for change, kind in (
        (lambda: s3.delete_object(Bucket=BUCKET, Key="llama/model.safetensors"), NotThere),
        (lambda: put(s3, "model.safetensors", b"other"), FetchError),
    ):
        put(s3, "model.safetensors", random_bytes(20 * MIB))  # two segments, one after the other
        changed = threading.Event()

        def once(
            progress: Progress, change: Callable[[], object] = change, changed: threading.Event = changed
        ) -> None:
            if progress.done > MIB and not changed.is_set():
                changed.set()
                change()

        into = tmp_path / kind.__name__
        message = failure(
            lambda into=into, once=once: fetcher_at(network.url, connections=1).fetch(into, on_progress=once),
            kind,
        )
        assert "model.safetensors" in message


def test_a_network_that_is_down_is_an_error_unless_a_complete_copy_is_here(
    s3: Any, network: Proxy, fetcher_at: Make, tmp_path: Path
) -> None:
    put(s3, "config.json", b"{}")
    put(s3, "model.safetensors", random_bytes(MIB))
    fetcher = fetcher_at(network.url)
    network.dead = True
    assert "weights.endpoint_url" in failure(lambda: fetcher.fetch(tmp_path), Unreachable)
    network.dead = False
    folder = fetcher.fetch(tmp_path)
    network.dead = True
    assert fetcher.fetch(tmp_path) == folder
    assert fetcher.fetch(tmp_path, small=True) == folder
    (folder / "model.safetensors").unlink()
    failure(lambda: fetcher.fetch(tmp_path), Unreachable)


def test_a_network_that_fails_in_the_middle_is_an_error_and_the_fetch_is_resumed(
    s3: Any, network: Proxy, fetcher_at: Make, tmp_path: Path
) -> None:
    content = put(s3, "model.safetensors", random_bytes(24 * MIB))
    network.rate = 16 * MIB

    def cut(progress: Progress) -> None:
        if progress.done > 8 * MIB:
            network.dead = True

    message = failure(lambda: fetcher_at(network.url).fetch(tmp_path, on_progress=cut), Unreachable)
    assert "what has arrived is kept" in message
    network.dead, network.rate, network.received = False, None, 0
    folder = fetcher_at(network.url).fetch(tmp_path)
    assert (folder / "model.safetensors").read_bytes() == content and network.received < 17 * MIB


def test_without_credentials_it_says_where_they_come_from(
    s3: Any, s3_url: str, fetcher_at: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    assert "AWS_PROFILE" in failure(lambda: fetcher_at(s3_url).fetch(tmp_path), FetchError)


def test_a_disk_without_room_is_an_error_before_the_first_request(
    s3: Any, network: Proxy, fetcher_at: Make, tmp_path: Path
) -> None:
    put(s3, "model.safetensors", random_bytes(4 * MIB))
    fetcher = fetcher_at(network.url, free_bytes=lambda folder: MIB)
    assert "weights.cache_folder" in failure(lambda: fetcher.fetch(tmp_path), FetchError)
    assert network.ranges == []


def test_a_disk_that_fills_up_during_the_fetch_is_an_error(s3: Any, s3_url: str, tmp_path: Path) -> None:
    put(s3, "model.safetensors", random_bytes(4 * MIB))
    code = (
        "import resource, sys; from pathlib import Path; from gateway.weights.errors import FetchError; "
        "from gateway.weights.s3 import S3Fetcher; from gateway.config.engine import WeightsSection\n"
        "from gateway.weights.location import S3Prefix\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        f"fetcher = S3Fetcher({LLAMA!r}, WeightsSection(endpoint_url={s3_url!r}))\n"
        f"try: fetcher.fetch(Path({str(tmp_path)!r}))\n"
        "except FetchError as error: print('full:', error)"
    )
    done = fork_server.run([sys.executable, "-c", code], cwd=ROOT)
    assert done.stdout.startswith("full:") and "weights.cache_folder" in done.stdout, done.stderr


def test_a_cache_that_cannot_be_a_folder_is_an_error(
    s3: Any, s3_url: str, fetcher_at: Make, tmp_path: Path
) -> None:
    put(s3, "config.json", b"{}")
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(FetchError, match=r"weights\.cache_folder"):
        fetcher_at(s3_url).fetch(tmp_path / "file")


def test_a_key_that_would_leave_the_folder_is_refused(
    s3: Any, s3_url: str, fetcher_at: Make, tmp_path: Path
) -> None:
    put(s3, "config.json", b"{}")
    put(s3, "a\\..\\b", b"")
    assert "remove it" in failure(lambda: fetcher_at(s3_url).fetch(tmp_path), UnknownLocation)


def test_an_object_that_is_not_there_is_told_without_the_setting_of_a_model() -> None:
    missing = ClientError({"Error": {"Code": "NoSuchKey"}}, "GetObject")
    told = str(meaning(missing, "s3://adapters/v1/adapter_config.json"))
    assert told == "s3://adapters/v1/adapter_config.json: S3 says NoSuchKey; check the bucket and the prefix"
