"""`sluice models fetch`: what an init container runs before the gateway starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import fork_server
from tests.weights.conftest import BUCKET

ROOT = Path(__file__).parents[2]


def fetch(*words: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    import os

    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    command = [sys.executable, "-m", "ops.cli", "models", "fetch", *words]
    environment = {**clean, "SLUICE_WEIGHTS__CACHE_FOLDER": str(folder / "cache"), **env}
    return fork_server.run(command, cwd=ROOT, env=environment, timeout=120)


def test_the_whole_model_is_there_afterwards_and_not_fetched_twice(
    s3: Any, s3_url: str, tmp_path: Path
) -> None:
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"w" * 100_000}
    for name, body in files.items():
        s3.put_object(Bucket=BUCKET, Key=f"tiny/{name}", Body=body)
    endpoint = {"SLUICE_WEIGHTS__ENDPOINT_URL": s3_url, "SLUICE_ENGINE__MODEL": f"s3://{BUCKET}/tiny"}
    done = fetch(folder=tmp_path, **endpoint)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert {name: (folder / name).read_bytes() for name in files} == files
    before = (folder / "model.safetensors").stat().st_mtime_ns
    again = fetch(folder=tmp_path, **endpoint)
    assert again.stdout == done.stdout
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("model", "said"),
    [("gs://bucket/model", "is not known here"), ("/no/such/folder", "no such folder")],
)
def test_what_cannot_be_fetched_is_one_line_and_an_exit_code(tmp_path: Path, model: str, said: str) -> None:
    done = fetch("--model", model, folder=tmp_path)
    assert done.returncode == 1
    assert said in done.stderr and done.stderr.startswith("sluice: ") and "Traceback" not in done.stderr


def test_a_folder_on_this_machine_needs_no_fetching(tmp_path: Path) -> None:
    done = fetch("--model", "models/demo", folder=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, "models/demo")
