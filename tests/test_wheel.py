"""The wheel is what users install: it is built, installed, started in another folder and sent a request."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOT_BUILT = ("tests/", "docs/", "benchmarks/")
THREE_LINES = """\
server: {port: 0}
auth: {enabled: false}
backends: {local: {kind: engine}}
"""
READY_WITHIN_S = 120.0


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of only the tracked files; a build writes into its source folder."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in tracked.decode().split("\0"):
        path = ROOT / name
        if name and not name.startswith(NOT_BUILT) and (path.is_symlink() or path.is_file()):
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target, follow_symlinks=False)
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(built), str(source))
    (made,) = built.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, which finds all other packages in this environment."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip("--python", str(python), "install", "--no-deps", "--no-index", "--no-compile", str(wheel))
    (packages,) = folder.glob("lib/python*/site-packages")
    # Python searches a folder named in a .pth file, but not that folder's .pth files: so it does not find the clone.
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def pip(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def clean() -> dict[str, str]:
    """Return the environment without Python's variables, which may name the clone, and without Sluice's."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SLUICE_"))}


def test_the_wheel_holds_the_product_and_its_data_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert tops == {
        "accounting", "adapters", "admission", "budgeting", "engine", "evaluation", "gateway", "observability",
        "ops", "resilience",
    }  # fmt: skip
    assert {
        "gateway/py.typed",
        "gateway/bundled/demo/model.safetensors",
        "gateway/bundled/demo/tokenizer.json",
        "gateway/bundled/prompts/chat-manga-2.1.yaml",
        "evaluation/adapter_regression/thresholds.yaml",
        "evaluation/quantization_eval/prompts.jsonl",
        "ops/bundled/grafana/sluice.json",
        "ops/bundled/prometheus/alerts.yaml",
        "ops/chaos/scenarios/engine-kill.yaml",
    } <= set(names)


@pytest.fixture
def running(environment: Path, tmp_path: Path) -> Iterator[tuple[str, Path, subprocess.Popen[bytes]]]:
    (tmp_path / "sluice.yaml").write_text(THREE_LINES)
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [environment / "bin" / "sluice", "serve"], cwd=tmp_path, env=clean(), stdout=out, stderr=out
        )
    try:
        end = time.monotonic() + READY_WITHIN_S
        while (found := re.search(r"Sluice on (http://\S+)", log.read_text())) is None or not ready(found[1]):
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        yield found[1], log, process
    finally:
        process.kill()
        process.wait()


def ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5):
            return True
    except (urllib.error.URLError, TimeoutError):
        return False


def test_a_gateway_from_the_wheel_answers_with_three_lines_of_configuration(
    running: tuple[str, Path, subprocess.Popen[bytes]],
) -> None:
    url, log, process = running
    body = {"messages": [{"role": "user", "content": "Something like Vinland Saga?"}]}
    asked = urllib.request.Request(
        f"{url}/v1/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=60) as reply:
        answer = json.load(reply)
    assert answer["backend"] == "embedded" and answer["output_text"].strip()
    output = log.read_text()
    assert "no prompt versions are registered" in output
    assert "one route over all backends" in output
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_benchmarks_and_training_are_no_packages_of_the_wheel(environment: Path, tmp_path: Path) -> None:
    code = (
        "import importlib.util as u, gateway, ops.cli.main;"
        "print(gateway.__file__, *[n for n in ('benchmarks', 'models', 'tests') if u.find_spec(n)])"
    )
    python = environment / "bin" / "python"
    done = subprocess.run(
        [python, "-c", code], cwd=tmp_path, env=clean(), capture_output=True, text=True, check=True
    )
    (where,) = done.stdout.split()
    assert Path(where).is_relative_to(environment)
