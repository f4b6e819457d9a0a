"""compose.yaml: its form, the policy of every service, and its servers, started from their own files."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import psutil
import pytest
import yaml

from gateway.config.settings import load_settings
from tests.deploy.dockerfiles import WRITABLE, contents, lay_out, read_dockerfile
from tests.deploy.manifests import published
from tests.integration.live import ADMIN_KEY, gateway

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "docker"
SCHEMA = published("compose")
PASSWORD = "p4ssw0rdofthetest"
SECRETS = ("SLUICE_ADMIN_KEY", "REDIS_PASSWORD", "POSTGRES_PASSWORD", "GF_SECURITY_ADMIN_PASSWORD")
# The image of otel-collector has no shell or client for a health check; fetch-model runs once and ends.
WITHOUT_HEALTH_CHECK = {"otel-collector", "fetch-model"}
START_TIMEOUT_S = 180.0


def interpolated(text: str, variables: dict[str, str]) -> str:
    """Replaces variables like compose: ``${NAME:-default}``, ``${NAME:?why}``, ``$$``."""

    def value(found: re.Match[str]) -> str:
        name, kind, rest = found["name"], found["kind"], found["rest"]
        if variables.get(name):
            return variables[name]
        assert kind != ":?", f"{name}: {rest}"
        return rest or ""

    text = re.sub(r"(?<!\$)\$\{(?P<name>[A-Z_]+)(?:(?P<kind>:[-?])(?P<rest>[^}]*))?\}", value, text)
    return text.replace("$$", "$")


def composed(**variables: str) -> dict[str, Any]:
    """compose.yaml as compose reads it, with a password for each secret."""
    given = dict.fromkeys(SECRETS, PASSWORD) | variables
    loaded: dict[str, Any] = yaml.safe_load(interpolated((FOLDER / "compose.yaml").read_text(), given))
    return loaded


SERVICES: dict[str, dict[str, Any]] = composed()["services"]


def test_the_file_has_the_form_of_a_compose_file() -> None:
    faults = [
        f"{list(e.path)}: {e.message}" for e in jsonschema.Draft7Validator(SCHEMA).iter_errors(composed())
    ]
    assert faults == []


def test_a_misspelled_key_would_be_found() -> None:
    wrong = composed()
    wrong["services"]["redis"]["mem_limt"] = "1g"
    assert list(jsonschema.Draft7Validator(SCHEMA).iter_errors(wrong))


def test_compose_has_every_server_that_the_gateway_can_use() -> None:
    assert {"gateway", "gateway-gpu", "redis", "postgres", "prometheus", "grafana", "otel-collector"} <= set(
        SERVICES
    )
    assert SERVICES["gateway"]["profiles"] == ["cpu"]
    assert SERVICES["gateway-gpu"]["profiles"] == SERVICES["fetch-model"]["profiles"] == ["gpu"]


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_confined(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"] and "privileged" not in service
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["mem_limit"] and service["pids_limit"]
    assert service["logging"]["options"]["max-size"], "logs must not fill the disk"
    if "build" not in service and not service["image"].startswith("sluice:"):
        assert not service["user"].startswith("0:")


@pytest.mark.parametrize("name", SERVICES)
def test_every_image_has_a_whole_version(name: str) -> None:
    assert re.search(r":v?\d+\.\d+(\.\d+)?", SERVICES[name]["image"]), SERVICES[name]["image"]


@pytest.mark.parametrize("name", sorted(set(SERVICES) - WITHOUT_HEALTH_CHECK))
def test_every_server_has_a_health_check(name: str) -> None:
    assert SERVICES[name]["healthcheck"]["test"]


@pytest.mark.parametrize("name", SERVICES)
def test_published_ports_listen_on_the_loopback_address(name: str) -> None:
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[name].get("ports", ()))


@pytest.mark.parametrize("name", SERVICES)
def test_every_file_that_is_mounted_is_there(name: str) -> None:
    volumes = composed()["volumes"]
    for mount in SERVICES[name].get("volumes", ()):
        source = mount.split(":")[0]
        assert (FOLDER / source).exists() if source.startswith(".") else source in volumes, source
        assert not source.startswith(".") or mount.endswith(":ro"), mount


def test_without_its_secrets_it_does_not_start() -> None:
    example = dict(
        line.split("=", 1)
        for line in (FOLDER / "example.env").read_text().splitlines()
        if line and not line.startswith("#")
    )
    assert set(SECRETS) <= set(example) and not any(example.values()), "the example holds no value"
    for secret in SECRETS:
        with pytest.raises(AssertionError, match=r"example\.env"):
            composed(**{secret: ""})


def test_the_gateways_environment_is_one_it_takes() -> None:
    for name, kind in (("gateway", "cpu"), ("gateway-gpu", "cuda")):
        environment = SERVICES[name]["environment"]
        settings = load_settings(FOLDER / f"gateway-{kind}.yaml", environment)
        assert settings.state.url == f"redis://:{PASSWORD}@redis:6379/0"
        assert (
            settings.ledger.url.startswith("postgresql+asyncpg://sluice:")
            and "@postgres:5432" in settings.ledger.url
        )
        assert settings.tracing.otlp_endpoint == "http://otel-collector:4318"


def test_the_gateway_has_time_to_drain() -> None:
    drain = load_settings(FOLDER / "gateway-cpu.yaml", {}).server.drain_seconds
    assert int(SERVICES["gateway"]["stop_grace_period"].rstrip("s")) >= drain + 20


def test_vllms_processes_can_share_memory() -> None:
    gpu = SERVICES["gateway-gpu"]
    assert gpu.get("ipc") == "host" or gpu.get("shm_size")


def test_grafana_finds_the_dashboard_and_prometheus() -> None:
    [datasource] = yaml.safe_load((FOLDER / "grafana" / "datasources.yaml").read_text())["datasources"]
    assert datasource["url"] == "http://prometheus:9090"
    [provider] = yaml.safe_load((FOLDER / "grafana" / "dashboards.yaml").read_text())["providers"]
    mounts = dict(m.split(":")[:2] for m in SERVICES["grafana"]["volumes"])
    assert mounts["../grafana"] == provider["options"]["path"]
    dashboard = (ROOT / "deploy" / "grafana" / "sluice.json").read_text()
    uids = set(re.findall(r'"uid": "(prometheus[^"]*)"', dashboard))
    assert uids <= {datasource["uid"]}


def test_the_collectors_pipeline_is_made_of_what_it_defines() -> None:
    config = yaml.safe_load((FOLDER / "otel-collector.yaml").read_text())
    for pipeline in config["service"]["pipelines"].values():
        for kind, names in pipeline.items():
            assert set(names) <= set(config[kind])
        assert pipeline["processors"][0] == "memory_limiter"
    port = config["receivers"]["otlp"]["protocols"]["http"]["endpoint"].rpartition(":")[2]
    assert SERVICES["gateway"]["environment"]["SLUICE_TRACING__OTLP_ENDPOINT"].endswith(f":{port}")


# The servers of the images, from this machine's packages, with compose's files and commands.


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(question: Any, process: subprocess.Popen[Any], log: Path) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()
        if question():
            return
        time.sleep(0.05)
    raise AssertionError(f"not up in time: {log.read_text()}")


def stop(process: subprocess.Popen[Any]) -> None:
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in children:
        if child.is_running():
            child.kill()


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, subprocess.Popen[Any]]]:
    """Port and process of a Redis, started and checked by compose's command, redis.conf and health check."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    folder, port = tmp_path_factory.mktemp("redis"), free_port()
    log = folder / "log"
    config = (FOLDER / "redis" / "redis.conf").read_text()
    config = config.replace("port 6379", f"port {port}").replace("dir /data", f"dir {folder}")
    (folder / "redis.conf").write_text(config)
    service = SERVICES["redis"]
    command = [
        word.replace("/etc/redis/redis.conf", str(folder / "redis.conf")) for word in service["command"]
    ]
    environment = {"PATH": os.environ["PATH"], **service["environment"]}
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
    shell = service["healthcheck"]["test"][1].replace("redis-cli", f"redis-cli -p {port}")

    def well() -> bool:
        done = subprocess.run(["sh", "-c", shell], env=environment, capture_output=True, timeout=60)
        return done.returncode == 0

    try:
        wait_until(well, process, log)
        yield port, process
    finally:
        stop(process)


def test_redis_starts_from_its_file_and_asks_for_the_password(
    redis_server: tuple[int, subprocess.Popen[Any]],
) -> None:
    import redis

    port, process = redis_server
    with redis.Redis(port=port) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()
    with redis.Redis(port=port, password=PASSWORD) as client:
        wanted = {"maxmemory-policy": "noeviction", "appendonly": "yes", "maxmemory": str(512 << 20)}
        assert {name: client.config_get(name)[name] for name in wanted} == wanted
    words = psutil.Process(process.pid).cmdline()
    assert words[0].startswith("redis-server"), "SIGTERM reaches Redis and no shell"
    assert not any(PASSWORD in word for word in words)


def postgres_binaries() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    on_path = shutil.which("initdb")
    return found[-1] if found else Path(on_path).parent if on_path else None


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Host and port of a PostgreSQL that is started from postgresql.conf and pg_hba.conf."""
    binaries = postgres_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed")
    # The server refuses to run as root; its folder must be reachable for the user that it runs as.
    user = "nobody" if os.geteuid() == 0 else None
    folder = Path(subprocess.check_output(["mktemp", "-d", "/tmp/sluice-pg-XXXXXX"], text=True).strip())
    if user is not None:
        shutil.chown(folder, user)
    service, port = SERVICES["postgres"], free_port()
    password, log = folder / "password", tmp_path_factory.mktemp("postgres") / "log"
    password.write_text(PASSWORD)
    password.chmod(0o644)
    arguments = service["environment"]["POSTGRES_INITDB_ARGS"].split()
    initdb = [
        str(binaries / "initdb"),
        "-D",
        str(folder / "data"),
        "-U",
        "sluice",
        f"--pwfile={password}",
        "-N",
    ]
    subprocess.run([*initdb, *arguments], user=user, cwd=folder, check=True, capture_output=True, timeout=120)
    for name in ("postgresql.conf", "pg_hba.conf"):
        text = (FOLDER / "postgres" / name).read_text()
        (folder / name).write_text(text.replace("port = 5432", f"port = {port}"))
    options = ["-D", str(folder / "data"), "-c", f"unix_socket_directories={folder}"]
    files = ["-c", f"config_file={folder}/postgresql.conf", "-c", f"hba_file={folder}/pg_hba.conf"]
    with log.open("w") as out:
        command = [str(binaries / "postgres"), *options, *files]
        process = subprocess.Popen(command, user=user, cwd=folder, stdout=out, stderr=out)
    try:
        ready = [str(binaries / "pg_isready"), "--quiet", "--host", "127.0.0.1", "--port", str(port)]
        wait_until(lambda: subprocess.run(ready, timeout=60).returncode == 0, process, log)
        yield f"127.0.0.1:{port}"
    finally:
        stop(process)
        shutil.rmtree(folder)


async def test_postgresql_starts_from_its_files_and_keeps_what_it_acknowledged(postgres: str) -> None:
    import asyncpg

    connection = await asyncpg.connect(f"postgresql://sluice:{PASSWORD}@{postgres}/postgres", timeout=60)
    try:
        wanted = {
            "synchronous_commit": "on",
            "fsync": "on",
            "password_encryption": "scram-sha-256",
            "statement_timeout": "1min",
            "shared_buffers": "256MB",
        }
        for name, value in wanted.items():
            assert await connection.fetchval(f"SHOW {name}") == value
        assert await connection.fetchval("SHOW data_checksums") == "on"
        faults = await connection.fetch("SELECT * FROM pg_file_settings WHERE error IS NOT NULL")
        assert not faults
    finally:
        await connection.close()
    with pytest.raises(asyncpg.InvalidPasswordError):
        await asyncpg.connect(f"postgresql://sluice:another@{postgres}/postgres", timeout=60)


def test_the_cpu_image_serves_with_redis_and_postgresql_and_writes_only_to_its_volumes(
    redis_server: tuple[int, subprocess.Popen[Any]], postgres: str, tmp_path: Path
) -> None:
    """With the image's files, configuration and environment, and compose's; a folder stands for `/`."""
    stage, image, volumes = (
        read_dockerfile(FOLDER / "Dockerfile.cpu").runtime,
        tmp_path / "image",
        tmp_path / "volumes",
    )
    lay_out(stage, image)
    for folder in WRITABLE:
        (volumes / folder.lstrip("/")).mkdir(parents=True)
    config = image / "etc" / "sluice" / "sluice.yaml"
    text = config.read_text()
    for inside, outside in (("/opt/sluice", image), ("/var/lib/sluice", volumes)):
        text = text.replace(inside, f"{outside}{inside}")
    config.write_text(text)
    workdir = image / stage.last("WORKDIR").lstrip("/")
    adapters = yaml.safe_load((workdir / "adapters.yaml").read_text())
    for entry in adapters["adapters"]:  # relative to the working directory, which differs here
        entry["path"] = str(workdir / entry["path"])
    (workdir / "adapters.yaml").write_text(yaml.safe_dump(adapters))
    environment = {
        name: f"{volumes}{value}"
        for name, value in stage.environment.items()
        # The compiled kernels of the suite are used; compiling takes half a minute.
        if value.startswith(WRITABLE) and name != "NUMBA_CACHE_DIR"
    }
    servers = {"redis:6379": f"127.0.0.1:{redis_server[0]}", "postgres:5432/sluice": f"{postgres}/postgres"}
    for name, value in SERVICES["gateway"]["environment"].items():
        for there, here in servers.items():
            value = value.replace(there, here)
        environment[name] = value
    environment |= {
        "SLUICE_ADMIN_KEY": ADMIN_KEY,
        "SLUICE_ENGINE__MODEL": str(workdir / "models" / "demo"),
        "SLUICE_SERVER__HOST": "127.0.0.1",
    }
    environment.pop("SLUICE_TRACING__OTLP_ENDPOINT")
    before = contents(image)
    with gateway(tmp_path, config=config, **environment) as live:
        body = {
            "messages": [{"role": "user", "content": "Who wrote Berserk?"}],
            "sampling": {"max_tokens": 4},
        }
        answer = httpx.post(f"{live.url}/v1/generate", json=body, headers=live.headers, timeout=60)
        assert answer.status_code == 200 and answer.json()["backend"] == "embedded"
        key = {"tenant": "acme", "role": "caller"}
        made = httpx.post(f"{live.url}/admin/keys", json=key, headers=live.headers, timeout=30)
        assert made.status_code == 201, made.text

        def written() -> bool:
            return live.metric("sluice_ledger_rows_total") >= 1

        wait_until(written, live.process, live.log)
        assert live.metric("sluice_ledger_rows_lost_total") == 0
        assert httpx.get(f"{live.url}/ready", timeout=60).status_code == 200
    assert contents(image) == before
    assert (volumes / "var/lib/sluice/ledger.journal").exists(), "what is written is in the volumes"


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_prometheus_starts_with_composes_command_and_knows_the_rules(tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    mounts = {"/etc/prometheus": str(ROOT / "deploy" / "prometheus"), "/prometheus": str(tmp_path / "data")}
    command = list(SERVICES["prometheus"]["command"])
    for inside, outside in mounts.items():
        command = [word.replace(f"={inside}", f"={outside}") for word in command]
    with log.open("w") as out:
        process = subprocess.Popen(
            ["prometheus", *command, f"--web.listen-address=127.0.0.1:{port}"], stdout=out, stderr=out
        )
    url = f"http://127.0.0.1:{port}"
    try:

        def ready() -> bool:
            try:
                return httpx.get(f"{url}/-/ready", timeout=60).status_code == 200
            except httpx.TransportError:
                return False

        wait_until(ready, process, log)
        groups = httpx.get(f"{url}/api/v1/rules", timeout=60).json()["data"]["groups"]
        assert {rule["type"] for group in groups for rule in group["rules"]} == {"alerting", "recording"}
        loaded = yaml.safe_load(httpx.get(f"{url}/api/v1/status/config", timeout=60).json()["data"]["yaml"])
        [job] = [job for job in loaded["scrape_configs"] if job["job_name"] == "sluice"]
        [alias] = SERVICES["gateway"]["networks"]["default"]["aliases"]
        assert job["static_configs"] == [{"targets": [f"{alias}:8000"]}]
    finally:
        stop(process)
