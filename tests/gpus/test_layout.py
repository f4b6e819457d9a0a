"""Which GPUs are served, and what front and workers are configured to."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from gateway.config.backends import OpenAIBackend
from gateway.config.errors import ConfigError
from gateway.config.settings import Settings
from gateway.routing.file import RoutingConfig
from ops.gpus.layout import (
    BACKEND,
    GPU_DEVICES,
    WORKER_ROUTING,
    WorkerPlacement,
    front_of,
    gpus_of,
    worker_of,
)
from ops.gpus.worker_group import make_worker_group, worker_environ


def tool(folder: Path, script: str) -> str:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.slow
def test_all_means_every_gpu_that_the_driver_lists(tmp_path: Path) -> None:
    assert gpus_of("all", tool=tool(tmp_path, "printf '0\\n1\\n2\\n3\\n'")) == ["0", "1", "2", "3"]


@pytest.mark.slow
def test_an_engine_over_several_gpus_gets_several(tmp_path: Path) -> None:
    listed = tool(tmp_path, "seq 0 7")
    assert gpus_of("0,1,4,5", each=2, tool=listed) == ["0,1", "4,5"]


@pytest.mark.slow
def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"given '1,9', but there is no GPU 9; there are 0, 1$"):
        gpus_of("1,9", tool=tool(tmp_path, "printf '0\\n1\\n'"))


@pytest.mark.skipif(any(Path(one).exists() for one in GPU_DEVICES), reason="has a GPU")
@pytest.mark.skipif(sys.platform != "linux", reason="the devices are Linux's")
@pytest.mark.slow
def test_indices_without_any_driver_are_refused_with_the_option_for_the_cpu(tmp_path: Path) -> None:
    for nvidia_smi in ("there-is-no-such-tool", tool(tmp_path, "exit 9")):
        with pytest.raises(ConfigError, match="given '0,9', but this machine has no GPU driver; --workers 2"):
            gpus_of("0,9", tool=nvidia_smi)


@pytest.mark.parametrize("spec", ["", "two", "0,x", "0,-1", "0,,1"])
def test_what_is_no_index_is_refused_with_what_is_allowed(spec: str) -> None:
    with pytest.raises(ConfigError, match="allowed: all, or indices"):
        gpus_of(spec)


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "each", "message"), [("0,0", 1, "twice"), ("0,1,2", 2, "multiple")])
def test_repeated_or_left_over_gpus_are_refused(spec: str, each: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        gpus_of(spec, each=each, tool=tool(tmp_path, "seq 0 7"))


@pytest.mark.slow
def test_a_machine_without_a_driver_says_how_to_name_them(tmp_path: Path) -> None:
    for nvidia_smi in ("there-is-no-such-tool", tool(tmp_path, "exit 9"), tool(tmp_path, "exit 0")):
        with pytest.raises(ConfigError, match="nvidia-smi lists no GPU here; name them"):
            gpus_of("all", tool=nvidia_smi)


SEATS = [WorkerPlacement("0", 9001), WorkerPlacement("1", 9002, 1)]


def test_in_front_a_backend_on_the_engine_becomes_a_pool_and_the_others_stay() -> None:
    settings = Settings.model_validate(
        {
            "backends": {
                "local": {"kind": "engine"},
                "far": {"kind": "bedrock", "model_id": "m", "region": "us-east-1"},
            }
        }
    )
    front = front_of(settings, SEATS)
    assert front.engine.kind == "none"
    pool = front.backends["local"]
    assert pool.kind == "openai"
    assert pool.base_urls == ["http://127.0.0.1:9001/v1", "http://127.0.0.1:9002/v1"]
    assert (pool.model, pool.max_running) == (settings.engine.model_id, settings.engine.max_num_seqs)
    assert pool.send_priority
    assert front.backends["far"] == settings.backends["far"]
    assert front.ledger == settings.ledger


def test_without_an_engine_there_is_nothing_to_spread() -> None:
    with pytest.raises(ConfigError, match="needs an engine"):
        front_of(Settings.model_validate({"engine": {"kind": "none"}, "backends": {}}), SEATS)


def test_unknown_fields_are_taken_as_by_an_engine_in_process() -> None:
    settings = Settings.model_validate({"backends": {"local": {"kind": "engine", "unknown_fields": "drop"}}})
    assert front_of(settings, SEATS).backends["local"].unknown_fields == "drop"


def test_a_request_may_take_as_long_at_a_worker_as_at_the_gateway_in_front(tmp_path: Path) -> None:
    settings = Settings.model_validate({"server": {"request_timeout_seconds": 1_800}})
    worker = Settings.model_validate(worker_of(settings, SEATS[1], tmp_path / "routing.yaml"))
    assert worker.server.request_timeout_seconds == 1_800
    pool = front_of(settings, SEATS).backends["local"]
    assert isinstance(pool, OpenAIBackend) and pool.total_timeout_seconds == 1_800


def test_a_workers_configuration_is_valid_on_loopback_and_keeps_no_accounts(tmp_path: Path) -> None:
    worker = Settings.model_validate(worker_of(Settings(), SEATS[1], tmp_path / "routing.yaml"))
    assert (worker.server.host, worker.server.port) == ("127.0.0.1", 9002)
    assert worker.auth.enabled
    assert worker.engine == Settings().engine
    assert worker.ledger.folder is None
    routes = RoutingConfig.model_validate(WORKER_ROUTING).routes
    assert [(route.backends[0].name, route.fallback) for route in routes.values()] == [(BACKEND, [])]


@pytest.mark.parametrize("url", ["sqlite:////srv/state.db", "redis://cache:6379/0"])
def test_a_worker_follows_the_fronts_registry_of_adapters(tmp_path: Path, url: str) -> None:
    settings = Settings.model_validate({"state": {"url": url}, "adapters": {"file": "adapters.yaml"}})
    worker = Settings.model_validate(worker_of(settings, SEATS[1], tmp_path / "routing.yaml"))
    assert (worker.adapters.state_url, worker.adapters.file) == (url, None)
    assert worker.state.url == "memory://"


def test_a_registry_in_memory_stays_where_it_is_and_workers_import_the_file(tmp_path: Path) -> None:
    settings = Settings.model_validate({"state": {"url": "memory://"}, "adapters": {"file": "adapters.yaml"}})
    worker = Settings.model_validate(worker_of(settings, SEATS[1], tmp_path / "routing.yaml"))
    assert (worker.adapters.state_url, worker.adapters.file) == (None, "adapters.yaml")


def test_a_worker_sees_its_gpu_and_nothing_that_would_override_its_file() -> None:
    environ = {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "0,1,2",
        "SLUICE_SERVER__PORT": "80",
        "MAX_MODEL_LEN": "9",
        "SLUICE_ADMIN_KEY": "the operator's",
    }
    found = worker_environ(environ, SEATS[1], "made")
    assert found == {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "1",
        "SLUICE_FRONT_KEY": "made",
        "SLUICE_WORKER_NUMBER": "1",
    }


@pytest.mark.slow
def test_the_workers_files_and_key_are_gone_afterwards() -> None:
    with make_worker_group(Settings(), ["0", "1"], "info") as group:
        files = [Path(worker.command[worker.command.index("--config") + 1]) for worker in group.workers]
        assert all(file.is_file() for file in files)
        assert len({worker.placement.port for worker in group.workers}) == 2
        assert "SLUICE_WORKER_KEY" not in "".join(file.read_text(encoding="utf-8") for file in files)
    assert not any(file.exists() for file in files)
