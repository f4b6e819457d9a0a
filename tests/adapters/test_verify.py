"""Adapters that the registry rejects before an engine loads them, each with its reason."""

from __future__ import annotations

import gzip
import io
import math
import pickle
import re
import struct
import sys
import tarfile
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.errors import AdapterRejected, Rejection
from adapters.safetensors import TensorPlace, is_finite
from adapters.unpack import unpack
from adapters.verify import verify
from tests.adapters.crafted import (
    RANK,
    adapter_config,
    base,
    floats,
    safetensors,
    tensor_name,
    tensors,
    with_header,
    write,
)


def rejection(folder: Path, **options: Any) -> AdapterRejected:
    with pytest.raises(AdapterRejected) as caught:
        verify(folder, base(), **options)
    return caught.value


def test_a_good_adapter_is_described(tmp_path: Path) -> None:
    found = verify(write(tmp_path / "good"), base())
    assert (found.rank, found.alpha, found.target_modules) == (2, 4.0, ("q_proj", "v_proj"))
    assert found.base_name == "tiny" and found.shapes_checked
    assert found.size_bytes == sum(path.stat().st_size for path in (tmp_path / "good").iterdir())


def test_the_digest_depends_on_the_two_files_and_on_nothing_else(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one"), write(tmp_path / "two")
    (two / "README.md").write_text("words")
    assert verify(one, base()).sha256 == verify(two, base()).sha256
    write(two, config=adapter_config(lora_alpha=5))
    assert verify(one, base()).sha256 != verify(two, base()).sha256


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"base_model_name_or_path": "llama-70b"}, Rejection.WRONG_BASE, "llama-70b"),
        ({"base_model_name_or_path": ...}, Rejection.BAD_CONFIG, "base_model_name_or_path"),
        ({"r": 512}, Rejection.RANK_TOO_HIGH, "at most 16"),
        ({"r": 0}, Rejection.BAD_CONFIG, "r is 0"),
        ({"r": True}, Rejection.BAD_CONFIG, "r is True"),
        ({"lora_alpha": "4"}, Rejection.BAD_CONFIG, "lora_alpha"),
        ({"lora_alpha": 10**400}, Rejection.BAD_CONFIG, "lora_alpha"),
        ({"target_modules": ["q_proj", "router"]}, Rejection.UNKNOWN_TARGET, "router"),
        ({"target_modules": "all-linear"}, Rejection.BAD_CONFIG, "target_modules"),
        ({"target_modules": ["q_proj", "v_proj", "up_proj"]}, Rejection.MISSING_TENSOR, "up_proj"),
        ({"target_modules": ["q_proj"]}, Rejection.UNKNOWN_TARGET, "v_proj"),
        ({"peft_type": "IA3"}, Rejection.UNSUPPORTED, "IA3"),
        ({"use_dora": True}, Rejection.UNSUPPORTED, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, Rejection.UNSUPPORTED, "modules_to_save"),
        ({"bias": "all"}, Rejection.UNSUPPORTED, "bias"),
        ({"init_lora_weights": "pissa"}, Rejection.UNSUPPORTED, "'pissa', which changes the base model's"),
        ({"init_lora_weights": ["eva"]}, Rejection.UNSUPPORTED, "init_lora_weights"),
        ({"target_parameters": ["experts.w1"]}, Rejection.UNSUPPORTED, "target_parameters"),
        ({"what_a_later_peft_does": 1}, Rejection.UNSUPPORTED, "what_a_later_peft_does"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, Any], code: Rejection, message: str
) -> None:
    error = rejection(write(tmp_path / "a", config=adapter_config(**changes)))
    assert error.code is code
    assert message in str(error)


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "[" * 100_000])
def test_a_configuration_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    assert rejection(write(tmp_path / "a", config=text)).code is Rejection.BAD_CONFIG


def changed(name: str, **entry: Any) -> bytes:
    """Valid weights, except for one tensor."""
    entries = tensors()
    dtype, shape, data = entries[name]
    entries[name] = (entry.get("dtype", dtype), entry.get("shape", shape), entry.get("data", data))
    return safetensors(entries)


A, B = tensor_name(1, "q_proj", "A"), tensor_name(1, "q_proj", "B")


def without(name: str) -> bytes:
    entries = tensors()
    del entries[name]
    return safetensors(entries)


def renamed(old: str, new: str) -> bytes:
    return safetensors({new if name == old else name: entry for name, entry in tensors().items()})


@pytest.mark.parametrize(
    ("weights", "code"),
    [
        (b"", Rejection.TRUNCATED),
        (b"\x10\x00\x00", Rejection.TRUNCATED),
        ((1 << 60).to_bytes(8, "little") + b"{}", Rejection.TRUNCATED),
        (safetensors(tensors())[:-1], Rejection.TRUNCATED),
        (safetensors(tensors()) + b"x", Rejection.BAD_HEADER),
        (b"\x02" + bytes(7) + b"{}", Rejection.BAD_HEADER),
        (b"\x02" + bytes(7) + b"[]", Rejection.BAD_HEADER),
        (pickle.dumps({"weights": [1.0]}), Rejection.TRUNCATED),
        (with_header({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}, bytes(8)), Rejection.BAD_HEADER),
        (with_header({"x": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}, bytes(8)), Rejection.BAD_HEADER),
        (with_header({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, bytes(4)), Rejection.BAD_HEADER),
        (with_header({"x": {"dtype": "F32", "shape": [1] * 9, "data_offsets": [0, 4]}}, bytes(4)), Rejection.BAD_HEADER),
        (
            with_header({n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"}, bytes(4)),
            Rejection.BAD_HEADER,
        ),
        (changed(A, shape=(4, 4), data=floats(16)), Rejection.BAD_SHAPE),
        (changed(A, shape=(4, 8), data=floats(32)), Rejection.BAD_SHAPE),
        (changed(B, shape=(4, 2), data=floats(8)), Rejection.BAD_SHAPE),
        (without(A), Rejection.MISSING_TENSOR),
        (without(B), Rejection.MISSING_TENSOR),
        (renamed(A, "model.embed_tokens.weight"), Rejection.UNKNOWN_TARGET),
        (renamed(A, A.replace(".layers.1.", f".layers.{'1' * 5_000}.")), Rejection.UNKNOWN_TARGET),
        (renamed(A, tensor_name(1, "router", "A")), Rejection.UNKNOWN_TARGET),
        (renamed(A, A.removeprefix("base_model.model.")), Rejection.UNKNOWN_TARGET),
        (renamed(A, A.replace(".weight", ".default.weight")), Rejection.UNKNOWN_TARGET),
        (renamed(A, A.replace("self_attn", "mlp")), Rejection.UNKNOWN_TARGET),
        (renamed(A, A.replace("model.layers", "layers")), Rejection.UNKNOWN_TARGET),
        (renamed(A, A.replace("layers.1", "layers.01")), Rejection.UNKNOWN_TARGET),
        (safetensors({tensor_name(7, "q_proj", s): tensors()[tensor_name(0, "q_proj", s)] for s in "AB"}), Rejection.BAD_SHAPE),
        (changed(A, data=floats(15) + floats(1, math.nan)), Rejection.NOT_FINITE),
        (changed(B, data=floats(1, -math.inf) + floats(15)), Rejection.NOT_FINITE),
    ],
)  # fmt: skip
def test_weights_that_are_wrong_are_refused(tmp_path: Path, weights: bytes, code: Rejection) -> None:
    assert rejection(write(tmp_path / "a", weights=weights)).code is code


def one_layer() -> bytes:
    return safetensors({name: entry for name, entry in tensors().items() if ".layers.0." in name})


@pytest.mark.parametrize(
    ("config", "weights", "code", "message"),
    [
        ({"layers_to_transform": [0]}, one_layer(), Rejection.UNSUPPORTED, "layers_to_transform"),
        ({}, one_layer(), Rejection.MISSING_TENSOR, "no tensors for layer 1, "),
        (
            {"target_modules": ["self_attn.q_proj", "v_proj"]},
            None,
            Rejection.UNKNOWN_TARGET,
            "self_attn.q_proj",
        ),
    ],
)
def test_what_only_vllm_runs_is_refused_before_the_embedded_engine_is_asked(
    tmp_path: Path, config: dict[str, Any], weights: bytes | None, code: Rejection, message: str
) -> None:
    folder = write(tmp_path / "a", config=adapter_config(**config), weights=weights)
    assert verify(folder, base()).rank == RANK
    with pytest.raises(AdapterRejected, match=re.escape(message)) as caught:
        verify(folder, replace(base(), embedded=True))
    assert caught.value.code is code


def test_another_digest_than_the_promised_one_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    promised = verify(folder, base()).sha256
    assert verify(folder, base(), sha256=promised.upper()).sha256 == promised
    (folder / "adapter_model.safetensors").write_bytes(changed(A, data=floats(16, 0.5)))
    assert rejection(folder, sha256=promised).code is Rejection.WRONG_CHECKSUM


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt", "optimizer.pkl", "weights.npz"])
def test_weights_in_a_format_that_can_run_code_are_refused_also_beside_good_ones(
    tmp_path: Path, name: str
) -> None:
    folder = write(tmp_path / "a")
    (folder / name).write_bytes(pickle.dumps([1]))
    error = rejection(folder)
    assert error.code is Rejection.NOT_SAFETENSORS and name in str(error)


def test_a_missing_folder_or_file_is_named(tmp_path: Path) -> None:
    assert rejection(tmp_path / "none").code is Rejection.NOT_FOUND
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        folder = write(tmp_path / name)
        (folder / name).unlink()
        error = rejection(folder)
        assert error.code is Rejection.NOT_FOUND and name in str(error)


@pytest.mark.parametrize("of", ["file", "folder"])
def test_a_symlink_that_leads_out_of_the_folder_is_refused(tmp_path: Path, of: str) -> None:
    folder, outside = write(tmp_path / "a"), tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("x")
    (folder / "extra").symlink_to(outside / "secret" if of == "file" else outside)
    assert rejection(folder).code is Rejection.OUTSIDE_FOLDER


def test_a_symlink_that_leads_to_itself_is_no_file(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    (folder / "loop").symlink_to(folder / "loop")
    assert rejection(folder).code is Rejection.NOT_FOUND


def test_folders_may_be_deeper_than_calls(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    inner = folder / "/".join(["d"] * 250)
    inner.mkdir(parents=True)
    (inner / "weights.bin").write_bytes(b"")
    before = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(250)
        error = rejection(folder)
    finally:
        sys.setrecursionlimit(before)
    assert error.code is Rejection.NOT_SAFETENSORS


def test_an_architecture_whose_shapes_are_not_known_is_checked_against_itself(tmp_path: Path) -> None:
    other = base(model_type="mamba-ish")
    assert not verify(write(tmp_path / "a"), other).shapes_checked
    folder = write(tmp_path / "b", weights=changed(B, shape=(8, 3), data=floats(24)))
    with pytest.raises(AdapterRejected) as caught:
        verify(folder, other)
    assert caught.value.code is Rejection.BAD_SHAPE


_PACK: dict[str, tuple[Callable[[float], bytes], int]] = {
    "F64": (lambda x: struct.pack("<d", x), 8),
    "F32": (lambda x: struct.pack("<f", x), 4),
    "F16": (lambda x: struct.pack("<e", x), 2),
    "BF16": (lambda x: struct.pack("<f", x)[2:], 2),
}


@pytest.mark.parametrize("dtype", sorted(_PACK))
@given(
    values=st.lists(
        st.floats(width=16) | st.sampled_from([math.nan, math.inf, -math.inf, 65504.0]), max_size=40
    )
)
def test_finite_numbers_are_told_from_others_by_their_bytes(dtype: str, values: list[float]) -> None:
    pack, size = _PACK[dtype]
    data = b"".join(map(pack, values))
    place = TensorPlace("x", dtype, (len(values),), 3, 3 + size * len(values))
    assert is_finite(io.BytesIO(b"pad" + data), place) is all(map(math.isfinite, values))


def test_the_largest_finite_numbers_are_finite() -> None:
    for dtype, raw in (("BF16", b"\x7f\x7f"), ("F32", b"\xff\xff\x7f\x7f"), ("F16", b"\xff\x7b")):
        assert is_finite(io.BytesIO(raw), TensorPlace("x", dtype, (1,), 0, len(raw)))


def tar_of(path: Path, *members: tuple[str, bytes | tarfile.TarInfo]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members:
            if isinstance(content, tarfile.TarInfo):
                tar.addfile(content)
                continue
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def files_of(folder: Path) -> list[tuple[str, bytes]]:
    return [(path.name, path.read_bytes()) for path in sorted(folder.iterdir())]


@pytest.mark.parametrize("prefix", ["", "my-adapter/"])
def test_an_archive_is_unpacked_with_or_without_a_folder_around(tmp_path: Path, prefix: str) -> None:
    members = [(prefix + name, data) for name, data in files_of(write(tmp_path / "a"))]
    unpack(tar_of(tmp_path / "a.tar.gz", *members), tmp_path / "out")
    assert verify(tmp_path / "out", base()) == verify(tmp_path / "a", base())


def link(kind: bytes, name: str, target: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    "member",
    [
        ("../escaped", b"x"),
        ("/tmp/escaped", b"x"),
        ("a/../../escaped", b"x"),
        ("..\\escaped", b"x"),
        ("link", link(tarfile.SYMTYPE, "link", "/etc/passwd")),
        ("hard", link(tarfile.LNKTYPE, "hard", "../x")),
        ("pipe", link(tarfile.FIFOTYPE, "pipe", "")),
    ],
)
def test_an_archive_cannot_write_outside_its_folder(
    tmp_path: Path, member: tuple[str, bytes | tarfile.TarInfo]
) -> None:
    archive = tar_of(tmp_path / "bad.tgz", ("adapter_config.json", b"{}"), member)
    with pytest.raises(AdapterRejected) as caught:
        unpack(archive, tmp_path / "deep" / "out")
    assert caught.value.code is Rejection.OUTSIDE_FOLDER
    assert not list(tmp_path.rglob("escaped"))


def test_an_archive_is_bounded_in_bytes_and_in_entries(tmp_path: Path) -> None:
    bomb = tar_of(tmp_path / "bomb.tgz", ("adapter_model.safetensors", bytes(3 << 20)))
    with pytest.raises(AdapterRejected) as caught:
        unpack(bomb, tmp_path / "one", max_bytes=1 << 20)
    assert caught.value.code is Rejection.TOO_LARGE
    many = tar_of(tmp_path / "many.tgz", *((f"f{n}", b"") for n in range(200)))
    with pytest.raises(AdapterRejected) as caught:
        unpack(many, tmp_path / "two")
    assert caught.value.code is Rejection.TOO_LARGE


def header_bomb(path: Path, kind: bytes, size: int, number: int = 1) -> Path:
    """Writes a tar.gz with ``number`` extended headers of ``size`` zero bytes each; returns its path."""
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(number):
            info = tarfile.TarInfo("././@PaxHeader")
            info.type, info.size = kind, size
            file.write(info.tobuf(tarfile.USTAR_FORMAT))
            for _ in range(size >> 20):
                file.write(bytes(1 << 20))
            file.write(bytes(size % (1 << 20)))
        file.write(tarfile.TarInfo("a").tobuf(tarfile.USTAR_FORMAT) + bytes(1024))
    return path


@pytest.mark.parametrize(
    ("kind", "size", "number"),
    [
        (tarfile.XHDTYPE, 64 << 20, 1),
        (tarfile.GNUTYPE_LONGNAME, 64 << 20, 1),
        (tarfile.XGLTYPE, 256 << 10, 40),
        # The content is skipped to reach the next header; its unpacked size is bounded, too.
        (tarfile.REGTYPE, 64 << 20, 1),
    ],
)
def test_headers_that_unpack_to_much_are_refused_before_they_are_in_memory(
    tmp_path: Path, kind: bytes, size: int, number: int
) -> None:
    bomb = header_bomb(tmp_path / "bomb.tar.gz", kind, size, number)
    tracemalloc.start()
    with pytest.raises(AdapterRejected) as caught:
        unpack(bomb, tmp_path / "out", max_bytes=32 << 20)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.code is Rejection.TOO_LARGE
    assert peak < 8 << 20 and not list(tmp_path.rglob("out"))


def test_an_archive_of_very_many_entries_is_refused(tmp_path: Path) -> None:
    crowd = tar_of(tmp_path / "crowd.tar.gz", *((f"{number:04}", b"") for number in range(300)))
    with pytest.raises(AdapterRejected, match="more than 128 entries") as caught:
        unpack(crowd, tmp_path / "out")
    assert caught.value.code is Rejection.TOO_LARGE


def test_a_name_longer_than_any_file_system_takes_is_refused(tmp_path: Path) -> None:
    deep = tar_of(tmp_path / "deep.tgz", ("/".join("a" * 200), b"x"))
    with pytest.raises(AdapterRejected, match="255 characters"):
        unpack(deep, tmp_path / "out")
    assert not list(tmp_path.rglob("out"))


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tar"])
@pytest.mark.parametrize("data", [b"", b"not an archive", b"\x1f\x8b\x08broken"])
def test_what_is_no_archive_is_told_so(tmp_path: Path, name: str, data: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(AdapterRejected) as caught:
        unpack(path, tmp_path / "out")
    assert caught.value.code is Rejection.BAD_ARCHIVE
