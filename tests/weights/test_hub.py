"""Fetching from the model hub, through huggingface_hub in a child process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.weights.errors import FetchError
from gateway.weights.hub import HubFetcher
from gateway.weights.location import HubModel
from gateway.weights.values import Progress
from tests.weights.fake_hub import COMMIT, Hub, hub

LLAMA = HubModel("org/llama")
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(range(256)) * 4096,
    "pytorch_model.bin": b"the same weights again",
}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with hub() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        served.models["org/llama"] = dict(FILES)
        yield served


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_small_files_first_then_the_weights_of_the_same_commit(models: Hub, tmp_path: Path) -> None:
    folder = HubFetcher(LLAMA).fetch(tmp_path, small=True)
    assert folder.is_relative_to(tmp_path / "hf") and folder.name == COMMIT
    assert names(folder) == ["config.json", "tokenizer.json"]
    progress: list[Progress] = []
    at_commit = HubFetcher(HubModel("org/llama", COMMIT))
    assert at_commit.fetch(tmp_path, on_progress=progress.append) == folder
    assert names(folder) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_the_hubs_cache_serves_without_the_hub(
    models: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = HubFetcher(LLAMA).fetch(tmp_path)
    models.asked.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert HubFetcher(LLAMA).fetch(tmp_path) == folder
    assert models.asked == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert HubFetcher(LLAMA).fetch(tmp_path) == folder


def test_a_relative_hf_home_is_in_the_working_folder(
    models: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", "cache")
    folder = HubFetcher(LLAMA).fetch(tmp_path)
    assert folder.absolute().is_relative_to(tmp_path / "cache")
    assert "config.json" in names(folder)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (HubModel("org/nothing"), "no such model"),
        (HubModel("org/llama", "v9"), "no such revision"),
        (HubModel("org/gated"), "gated"),
    ],
)
def test_what_the_hub_refuses_is_one_clear_line(
    models: Hub, tmp_path: Path, model: HubModel, message: str
) -> None:
    models.models["org/gated"] = dict(FILES)
    models.gated.add("org/gated")
    with pytest.raises(FetchError, match=message) as caught:
        HubFetcher(model).fetch(tmp_path)
    assert "\n" not in str(caught.value)
    assert "engine.model" not in str(caught.value), "it may be one of engines, or a tokenizer"


def test_offline_with_an_empty_cache_says_what_to_do(
    models: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FetchError, match=r"^org/llama: .*HF_HUB_OFFLINE.* name a folder"):
        HubFetcher(LLAMA).fetch(tmp_path)


def test_a_stop_ends_the_child(models: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # An address that never answers: the library would wait for its own timeouts.
    monkeypatch.setenv("HF_ENDPOINT", "http://10.255.255.1")
    stop = threading.Event()
    stop.set()
    began = time.monotonic()
    with pytest.raises(FetchError):
        HubFetcher(LLAMA).fetch(tmp_path, stop=stop)
    assert time.monotonic() - began < 9
