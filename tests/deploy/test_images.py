"""The policy of the Dockerfiles, and the files next to them."""

from __future__ import annotations

import ast
import fnmatch
import json
import os
import re
import stat
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from gateway.config.settings import load_settings
from tests import fork_server
from tests.deploy.dockerfiles import WRITABLE, Dockerfile, read_dockerfile

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "docker"
NAMES = ("Dockerfile.cpu", "Dockerfile.cuda")


@pytest.fixture(params=NAMES)
def dockerfile(request: pytest.FixtureRequest) -> Dockerfile:
    return read_dockerfile(FOLDER / request.param)


def test_bases_are_pinned(dockerfile: Dockerfile) -> None:
    for stage in dockerfile.stages:
        tag = stage.base.partition("@")[0].rpartition(":")[2]
        assert re.search(r"\d+\.\d+\.\d+", tag), f"{stage.base}: a whole version, never latest"


def test_the_image_runs_as_a_numeric_user_that_is_not_root(dockerfile: Dockerfile) -> None:
    user, group = dockerfile.runtime.last("USER").split(":")
    assert int(user) >= 10_000 and int(group) >= 10_000, (
        "a number, so that Kubernetes can tell it is not root"
    )
    words = [i.word for i in dockerfile.runtime.instructions]
    assert "RUN" not in words[words.index("USER") :]


def test_everything_that_is_written_lies_in_a_volume(dockerfile: Dockerfile) -> None:
    volumes = json.loads(dockerfile.runtime.last("VOLUME"))
    assert volumes == ["/var/lib/sluice", "/var/cache/sluice"]
    names = ("HOME", "HF_HOME", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "SLUICE_WEIGHTS__CACHE_FOLDER")
    environment = dockerfile.runtime.environment
    for name in names:
        assert environment[name].startswith(WRITABLE), name
    assert environment["PYTHONDONTWRITEBYTECODE"] == "1"


def test_the_image_is_alive_while_it_loads_and_stops_by_draining(dockerfile: Dockerfile) -> None:
    check = dockerfile.runtime.last("HEALTHCHECK")
    assert check.endswith('["healthcheck", "ping"]'), "not /ready: an orchestrator kills what is unhealthy"
    assert int(re.search(r"--start-period=(\d+)s", check)[1]) >= 90  # type: ignore[index]
    assert dockerfile.runtime.last("STOPSIGNAL") == "SIGTERM"
    entry = json.loads(dockerfile.runtime.last("ENTRYPOINT"))
    assert entry == ["sluice"], "no shell between the signal and the gateway"
    assert json.loads(dockerfile.runtime.last("CMD")) == ["serve"]


def test_no_secret_is_baked_in(dockerfile: Dockerfile) -> None:
    for stage in dockerfile.stages:
        for line in [*stage.all("ENV"), *stage.all("ARG")]:
            assert not re.search(r"KEY|SECRET|PASSWORD|TOKEN", line), line


def test_what_is_copied_is_there_and_not_ignored(dockerfile: Dockerfile) -> None:
    ignored = [
        line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] not in ("", "#")
    ]
    kept = [line[1:] for line in ignored if line.startswith("!")]
    for stage in dockerfile.stages:
        for sources, _ in stage.copied:
            for source in sources:
                assert (ROOT / source).exists(), source
                assert any(source == keep or source.startswith(f"{keep}/") for keep in kept), source


def test_every_package_is_in_the_image(dockerfile: Dockerfile) -> None:
    """A package of pyproject.toml that no COPY names would be missing only at run time."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["packages"]["find"]["include"]
    copied = {source for sources, _ in dockerfile.stages[0].copied for source in sources}
    packages = {p.parent.name for p in ROOT.glob("*/__init__.py")}
    for package in packages:
        if any(fnmatch.fnmatch(package, pattern) for pattern in patterns):
            assert package in copied, package


def test_extras_of_the_images_are_extras_of_the_project(dockerfile: Dockerfile) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    runs = [run for stage in dockerfile.stages for run in stage.all("RUN")]
    asked = {
        extra for run in runs for found in re.findall(r"\[([a-z0-9,]+)\]", run) for extra in found.split(",")
    }
    assert {"bedrock", "hub", "postgres", "redis", "s3"} <= asked <= set(project["optional-dependencies"])


def test_the_light_images_torch_is_the_projects() -> None:
    build = read_dockerfile(FOLDER / "Dockerfile.cpu").stages[0]
    embedded = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][
        "embedded"
    ]
    torch = next(line for line in embedded if line.startswith("torch"))
    assert f"TORCH={torch}" in build.all("ARG")


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_images_configuration_is_one_the_gateway_takes(kind: str) -> None:
    environment = read_dockerfile(FOLDER / f"Dockerfile.{kind}").runtime.environment
    settings = load_settings(FOLDER / f"gateway-{kind}.yaml", environment)
    assert settings.auth.enabled and settings.server.host == "0.0.0.0"
    for url in (settings.state.url, settings.ledger.url):
        assert url.split("///")[1].startswith("/var/lib/sluice/")
    assert settings.weights.cache_folder.startswith("/var/cache/sluice")
    assert settings.batches.folder.startswith("/var/lib/sluice/")


@contextmanager
def answering(status: int) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(self.path.encode())

        def log_message(self, *args: object) -> None:
            """Logs nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def check_health(word: str, port: int, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "SLUICE_SERVER__PORT": str(port), **more}
    command = [sys.executable, str(FOLDER / "healthcheck"), word]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)


def test_the_health_check_tells_by_its_exit_code() -> None:
    assert os.stat(FOLDER / "healthcheck").st_mode & stat.S_IXUSR
    with answering(200) as port:
        asked = check_health("ready", port)
        assert asked.returncode == 0 and asked.stdout.strip() == "/ready"
        assert check_health("pong", port).returncode != 0
        assert check_health("ping", port, http_proxy="http://127.0.0.1:9").returncode == 0, "asked directly"
    with answering(503) as port:
        refused = check_health("ready", port)
        assert refused.returncode == 1 and "503" in refused.stderr
    gone = check_health("ping", port)
    assert gone.returncode == 1 and "Traceback" not in gone.stderr


def test_images_are_pinned_by_asking_the_registry(tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\necho "sha256:$(printf %s "$6" | sha256sum | cut -d" " -f1)"\n')
    docker.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [str(FOLDER / "pin-images")], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    pinned = dict(line.split("=", 1) for line in done.stdout.splitlines())
    composed = re.findall(r"\$\{([A-Z_]+_IMAGE):-", (FOLDER / "compose.yaml").read_text())
    assert set(pinned) == {n for n in composed if not n.startswith("SLUICE_")} | {
        "PYTHON_IMAGE",
        "VLLM_IMAGE",
    }
    assert all(re.fullmatch(r"\S+:\S+@sha256:[0-9a-f]{64}", image) for image in pinned.values())
    docker.write_text("#!/bin/sh\necho no such image\n")
    failed = subprocess.run([str(FOLDER / "pin-images")], env=environment, capture_output=True, timeout=60)
    assert failed.returncode != 0


def test_the_entry_command_is_there() -> None:
    command = [sys.executable, "-m", "ops.cli", "serve", "--help"]
    done = fork_server.run(command, cwd=ROOT, timeout=60)
    assert done.returncode == 0 and "SIGTERM drains" in done.stdout
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, function = scripts["sluice"].split(":")
    source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
    assert function in {n.name for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)}
