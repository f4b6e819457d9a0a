"""A gateway in an empty folder, in front of a worker that runs already."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from openai import OpenAI

from gateway.config.settings import Settings
from ops.cli.serve import source_of
from tests import fork_server
from tests.integration.live import ADMIN_KEY, ROOT, LiveGateway, gateway

pytestmark = pytest.mark.xdist_group("in-front-of-a-worker")


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveGateway]:
    """Another Sluice; it lists its model as vLLM does."""
    with gateway(tmp_path_factory.mktemp("worker"), SLUICE_ENGINE__MAX_MODEL_LEN="1024") as live:
        yield live


def sluice(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    environ = {**clean, "PYTHONPATH": str(ROOT), "WORKER_API_KEY": ADMIN_KEY, **env}
    command = [sys.executable, "-m", "ops.cli", *words]
    return fork_server.run(command, cwd=folder, env=environ, timeout=300)


def test_a_configuration_is_written_from_what_the_worker_says_and_doctor_finds_it_right(
    worker: LiveGateway, tmp_path: Path
) -> None:
    done = sluice(tmp_path, "init", "--worker", worker.url)
    assert done.returncode == 0, done.stderr
    written = yaml.safe_load((tmp_path / "sluice.yaml").read_text())
    assert written["backends"]["worker"]["model"] == written["engine"]["served_model_name"] == "demo"
    assert "max_model_len" not in written["engine"] and written["auth"] == {"enabled": False}
    again = sluice(tmp_path, "init", "--worker", worker.url)
    assert again.returncode == 1 and "--force replaces it" in again.stderr

    examined = sluice(tmp_path, "doctor", "--json")
    checks = {one["check"]: one for one in json.loads(examined.stdout)["checks"]}
    [found] = [one for name, one in checks.items() if name.startswith("worker ")]
    assert found["ok"] and "serves demo, 1024 tokens, tokenizer its own" in found["detail"], found
    own = checks["model folder, prompts, adapters, routing"]
    assert own["ok"] and own["detail"].startswith("no model in this process"), own
    assert checks["token counting demo"]["detail"] == "the workers' /tokenize"
    assert checks["prices"]["detail"].startswith("none for worker: what they answer costs nothing"), checks
    assert checks["similar questions"]["detail"].startswith("only exact matches"), checks
    similar = {"similar": {"model": "bge-small", "threshold": 0.9}}
    route = {"backends": [{"name": "worker"}], "fallback": ["response_cache"], "response_cache": similar}
    (tmp_path / "similar.yaml").write_text(yaml.safe_dump({"routes": {"chat": route}}))
    wrong = sluice(
        tmp_path,
        "doctor",
        "--json",
        SLUICE_BACKENDS__WORKER__MODEL="other",
        SLUICE_ROUTING__FILE="similar.yaml",
        SLUICE_STATE__URL=f"sqlite:///{tmp_path}/other.db",
    )
    [lacking] = [one for one in json.loads(wrong.stdout)["checks"] if one["check"] == "similar questions"]
    assert not lacking["ok"] and lacking["detail"] == "no backend makes embeddings with bge-small", lacking
    assert "response_cache.similar.model of chat" in lacking["hint"]
    [found] = [one for one in json.loads(wrong.stdout)["checks"] if one["check"].startswith("worker ")]
    assert wrong.returncode == 1 and not found["ok"]
    assert found["detail"] == "does not serve 'other'" and "demo" in found["hint"]


def test_the_first_answer_comes_without_any_file(worker: LiveGateway, tmp_path: Path) -> None:
    """The folder is empty: no configuration, no prompts, no routing, no tokenizer of its own."""
    environ = {"WORKER_API_KEY": ADMIN_KEY}
    with gateway(tmp_path, words=["--worker", worker.url], config="", **environ) as front:
        client = OpenAI(base_url=f"{front.url}/v1", api_key=ADMIN_KEY)
        [model] = [one.id for one in client.models.list() if one.id == "demo"]
        answer = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Tell me about Berserk"}]
        )
        assert answer.choices[0].message.content and answer.model == "demo"


def test_the_start_line_names_a_routing_file_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url, settings = "http://127.0.0.1:9", Settings.model_validate({"backends": {}})
    assert source_of(settings, [url], None) == url
    (tmp_path / "routing.yaml").write_text("routes: {}")
    assert source_of(settings, [url], None) == f"{url}, routing: routing.yaml of this folder"
    named = Settings.model_validate({"backends": {}, "routing": {"file": "other.yaml"}})
    assert source_of(named, [url], None) == url
    assert source_of(settings, [], Path("sluice.yaml")) == "sluice.yaml"


def test_a_worker_that_does_not_answer_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    done = sluice(tmp_path, "serve", "--worker", "http://127.0.0.1:9")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "http://127.0.0.1:9/v1: no answer" in done.stderr and "is the worker running" in done.stderr
