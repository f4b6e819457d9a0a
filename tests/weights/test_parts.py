"""The parts of a fetch: addresses, byte ranges, part files, checksums, settings."""

from __future__ import annotations

import base64
import hashlib
import zlib
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.settings import Settings, load_settings
from gateway.weights.checksum import Expected, fault, from_head, is_manifest, read_manifest
from gateway.weights.errors import UnknownLocation
from gateway.weights.location import HubModel, S3Prefix, is_safe, is_small, locate, needed
from gateway.weights.part_file import PartFile
from gateway.weights.progress import LogProgress
from gateway.weights.records import write_json
from gateway.weights.source import prepare
from gateway.weights.values import Progress, RemoteFile


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("s3://bucket/a/b", S3Prefix("bucket", "a/b")),
        ("s3://bucket/a/b/", S3Prefix("bucket", "a/b")),
        ("s3://bucket", S3Prefix("bucket", "")),
        ("org/name", HubModel("org/name")),
        ("org/name@v1.2", HubModel("org/name", "v1.2")),
        ("hf://models/demo", HubModel("models/demo")),
        ("models/demo", Path("models/demo")),
        ("models/dmeo", Path("models/dmeo")),
        ("/srv/llama", Path("/srv/llama")),
        ("./org/name", Path("org/name")),
        ("llama", Path("llama")),
    ],
)
def test_an_address_is_a_folder_a_hub_id_or_a_prefix(given: str, meant: object) -> None:
    assert locate(given) == meant


@pytest.mark.parametrize("given", ["s3://", "s3:///x", "gs://bucket/x", "https://host/model", "hf://name"])
def test_another_address_is_refused_with_what_is_allowed(given: str) -> None:
    with pytest.raises(UnknownLocation, match=r"://"):
        locate(given)


def test_a_bucket_whose_name_is_too_short_is_refused_with_the_form_of_one() -> None:
    with pytest.raises(
        UnknownLocation, match="'s3://x/y' is not s3://bucket/prefix; a bucket's name is of 2 to"
    ):
        locate("s3://x/y")


@pytest.mark.parametrize(
    "given", ["s3://me:hun/ter2@bucket/x", "hf://me:hun/ter2@org/name", "https://me:hun/ter2@host/model?a=1"]
)
def test_a_refused_address_is_shown_without_its_password(given: str) -> None:
    with pytest.raises(UnknownLocation, match=r"'\w+://…@") as caught:
        locate(given)
    assert "ter2" not in str(caught.value)


def test_a_file_that_cannot_be_replaced_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "demand.json").mkdir()
    with pytest.raises(OSError):
        write_json(tmp_path / "demand.json", {"at": 1.0})
    assert [one.name for one in tmp_path.iterdir()] == ["demand.json"]


def test_a_local_folder_changes_nothing() -> None:
    settings = load_settings(None, {})
    engine, weights = prepare(settings.engine, settings.weights)
    assert engine is settings.engine and not weights.remote and weights.folder == Path("models/demo")


def test_a_model_that_only_other_servers_serve_is_not_fetched() -> None:
    engine = {"kind": "none", "model": "s3://nowhere/model", "tokenizer": "models/demo"}
    workers = {"worker": {"kind": "openai", "base_urls": ["http://127.0.0.1:1/v1"], "model": "base"}}
    settings = Settings.model_validate({"engine": engine, "backends": workers})
    prepared, weights = prepare(settings.engine, settings.weights)
    assert prepared is settings.engine and not weights.remote


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("a", True),
        ("a/b.json", True),
        ("../a", False),
        ("a//b", False),
        ("/a", False),
        ("a\\b", False),
        ("a/.", False),
    ],
)
def test_names_that_leave_their_folder_are_not_safe(name: str, safe: bool) -> None:
    assert is_safe(name) is safe


def test_weights_are_large_and_the_rest_is_small() -> None:
    assert is_small("tokenizer.json") and is_small("tokenizer.model") and is_small("chat_template.jinja")
    assert not is_small("model-00001-of-00002.safetensors") and not is_small("a/pytorch_model.bin")


def test_other_formats_are_left_out_only_when_there_are_safetensors() -> None:
    assert needed({"a.safetensors", "a.bin", "original/x.json"}) == {"a.safetensors"}
    assert needed({"adapter_model.bin", "x.json"}) == {"adapter_model.bin", "x.json"}


@given(data=st.data())
def test_a_part_file_knows_what_it_holds_after_any_end(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = data.draw(st.binary(min_size=1, max_size=64))
    segment = data.draw(st.integers(1, 70))
    file = RemoteFile("m", len(content), "etag")
    path = tmp_path_factory.mktemp("part") / "m.part"
    here = 0
    for _ in range(data.draw(st.integers(0, 4))):
        with PartFile(path, file, segment) as part:
            assert (
                part.received_bytes == here == len(content) - sum(end - start for start, end in part.missing)
            )
            for start, end in data.draw(st.permutations(part.missing)):
                size = data.draw(st.integers(0, end - start))
                part.write(start, content[start : start + size])
                here += size
    with PartFile(path, file, segment) as part:
        assert all(0 < end - start <= segment for start, end in part.missing)
        for start, end in part.missing:
            part.write(start, content[start:end])
        assert part.missing == [] and part.received_bytes == len(content)
        part.finish(path.with_name("m"))
    assert path.with_name("m").read_bytes() == content
    assert [p.name for p in path.parent.iterdir()] == ["m"]


@given(torn=st.binary(max_size=60))
def test_a_damaged_counts_file_is_not_trusted(torn: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("part") / "m.part"
    file = RemoteFile("m", 4, "etag")
    with PartFile(path, file) as part:
        part.write(0, b"ab")
    counts = path.with_name("m.part.counts")
    for content in (torn, counts.read_bytes()[: len(torn)]):
        counts.write_bytes(content)
        with PartFile(path, file) as part:
            assert part.missing in ([(0, 4)], [(2, 4)])


def test_a_part_of_another_version_or_without_counts_starts_again(tmp_path: Path) -> None:
    path = tmp_path / "m.part"
    with PartFile(path, RemoteFile("m", 4, "one")) as part:
        part.write(0, b"abcd")
    with PartFile(path, RemoteFile("m", 4, "two")) as part:
        assert part.missing == [(0, 4)]
        part.write(0, b"ab")
    path.with_name("m.part.counts").unlink()
    with PartFile(path, RemoteFile("m", 4, "two")) as part:
        assert part.missing == [(0, 4)]


def test_an_empty_file_is_complete_at_once(tmp_path: Path) -> None:
    with PartFile(tmp_path / "m.part", RemoteFile("m", 0, "etag")) as part:
        assert part.missing == []
        part.finish(tmp_path / "m")
    assert (tmp_path / "m").read_bytes() == b""


def test_progress_is_logged_now_and_then() -> None:
    now = 0.0
    with structlog.testing.capture_logs() as lines:
        log = LogProgress("s3://b/m", lambda: now)
        for now in (0.0, 1.0, 9.0, 11.0, 12.0, 22.0):
            log(Progress(int(now) << 20, 44 << 20))
    assert [(line["done_mib"], line["percent"], line["mib_per_s"]) for line in lines] == [
        (11, 25, 1.0),
        (22, 50, 1.0),
    ]


def nothing() -> None:
    """Do not stop."""


def test_each_kind_of_checksum_finds_wrong_content(tmp_path: Path) -> None:
    content = b"0123456789"
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_bytes(content)
    bad.write_bytes(b"012345678x")
    halves = hashlib.md5(content[:6]).digest() + hashlib.md5(content[6:]).digest()
    for expected in (
        Expected("sha256", hashlib.sha256(content).hexdigest(), 10),
        Expected("sha1", hashlib.sha1(content).hexdigest(), 10),
        Expected("md5", hashlib.md5(content).hexdigest().upper(), 10),
        Expected("crc32", f"{zlib.crc32(content):08x}", 10),
        Expected("multipart-md5", hashlib.md5(halves).hexdigest() + "-2", 10, 6),
    ):
        assert fault(good, expected, nothing) is None
        assert expected.kind in (fault(bad, expected, nothing) or "")
    assert fault(good, Expected("size", "", 11), nothing) == "10 bytes instead of 11"
    assert fault(bad, Expected("size", "", 10), nothing) is None


def test_manifests_name_files_below_their_own_folder() -> None:
    digest = "A" * 64
    assert read_manifest("SHA256SUMS", f"{digest}  a\n{digest} *./b/c\n# no\n") == {
        "a": "a" * 64,
        "b/c": "a" * 64,
    }
    assert read_manifest("x/SHA256SUMS", f"{digest}  a") == {"x/a": "a" * 64}
    assert read_manifest("x/a.bin.sha256", f"{digest}\n") == {"x/a.bin": "a" * 64}
    assert is_manifest("x/SHA256SUMS") and is_manifest("a.sha256") and not is_manifest("SHA256SUMS.txt")


def test_s3s_checksums_are_used_only_where_they_can_be_verified() -> None:
    md5, size = "0" * 32, 10
    crc = base64.b64encode(bytes(4)).decode()
    ask = lambda: 6  # noqa: E731
    assert from_head({"ETag": f'"{md5}"'}, size, ask) == Expected("md5", md5, size)
    assert from_head({"ETag": f'"{md5}"', "ChecksumCRC32": crc}, size, ask).kind == "crc32"
    assert from_head({"ETag": f'"{md5}-2"'}, size, ask) == Expected("multipart-md5", f"{md5}-2", size, 6)
    # These are no digests of the whole content, or their part sizes are unknown.
    assert from_head({"ETag": f'"{md5}"', "ServerSideEncryption": "aws:kms"}, size, ask).kind == "size"
    assert from_head({"ETag": f'"{md5}-2"', "ChecksumCRC32": crc}, size, ask).kind == "multipart-md5"
    assert from_head({"ETag": f'"{md5}-3"'}, size, ask).kind == "size"
    assert from_head({"ETag": f'"{md5}-2"'}, size, lambda: None).kind == "size"
    composite = {"ETag": f'"{md5}-2"', "ChecksumSHA256": "x-2", "ChecksumType": "COMPOSITE"}
    assert from_head(composite, size, ask).kind == "multipart-md5"
