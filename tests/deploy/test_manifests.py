"""The Kubernetes manifests: their form, and the policy of every overlay."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config.settings import Settings, load_settings
from gateway.keys.shared_limits import CLOSE_TIMEOUT_S
from gateway.wiring.running import ENGINE_STOP_TIMEOUT_S, FLUSH_TIMEOUT_S
from tests.deploy.manifests import OVERLAYS, ROOT, Manifest, faults, inputs_digest, one, rendered

UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
WRITABLE = {"/var/lib/sluice", "/var/cache/sluice", "/tmp"}
AUTOSCALED = [name for name in OVERLAYS if name.startswith("gpu")]


@pytest.fixture(params=OVERLAYS)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return rendered(request.param)[1]


@pytest.fixture
def pod(manifests: list[Manifest]) -> dict[str, Any]:
    spec: dict[str, Any] = one(manifests, "Deployment")["spec"]["template"]["spec"]
    return spec


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def size(text: str) -> int:
    found = re.fullmatch(r"(\d+)(Ki|Mi|Gi)", text)
    assert found, text
    return int(found[1]) * UNITS[found[2]]


def settings_of(manifests: list[Manifest], folder: Path) -> Settings:
    """The gateway's settings in the pod: the ConfigMap and the container's environment."""
    file = folder / "sluice.yaml"
    file.write_text(one(manifests, "ConfigMap")["data"]["sluice.yaml"])
    [container] = one(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
    urls = {
        "SLUICE_STATE__URL": "redis://redis:6379/0",
        "SLUICE_LEDGER__URL": "postgresql+asyncpg://u:p@db/sluice",
    }
    environment = {
        e["name"]: e.get("value") or urls.get(e["name"], "from-the-secret") for e in container["env"]
    }
    return load_settings(file, environment)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_rendered_manifests_are_up_to_date(overlay: str) -> None:
    assert rendered(overlay)[0] == inputs_digest(), "run deploy/k8s/render"


@pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl is not installed; the digest is compared anyway"
)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kustomize_makes_what_is_rendered(overlay: str) -> None:
    command = ["kubectl", "kustomize", str(ROOT / "overlays" / overlay)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert made.returncode == 0, made.stderr
    assert list(yaml.safe_load_all(made.stdout)) == rendered(overlay)[1]


def test_every_manifest_has_the_form_of_its_kind(manifests: list[Manifest]) -> None:
    assert [fault for manifest in manifests for fault in faults(manifest)] == []


@pytest.mark.parametrize(
    ("kind", "path", "field"),
    [
        ("Deployment", ("spec", "template", "spec"), "terminationGracePeriod"),
        ("PodDisruptionBudget", ("spec",), "maxUnavailble"),
        ("ScaledObject", ("spec",), "minReplicas"),
        ("ServiceMonitor", ("spec",), "endpoint"),
        ("InferencePool", ("spec",), "targetPortNumber"),
        ("HTTPRoute", ("spec",), "rule"),
        ("ExternalSecret", ("spec",), "secretStore"),
    ],
)
def test_a_misspelled_field_would_be_found(kind: str, path: tuple[str, ...], field: str) -> None:
    wrong = copy.deepcopy(one(rendered("gpu")[1], kind))
    place: Any = wrong
    for key in path:
        place = place[key]
    place[field] = 1
    assert faults(wrong)


def test_everything_lies_in_its_own_namespace(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        if manifest["kind"] != "Namespace":
            assert manifest["metadata"]["namespace"] == "sluice", manifest["kind"]
    labels = one(manifests, "Namespace")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_pods_keep_the_restricted_standard(pod: dict[str, Any]) -> None:
    security = pod["securityContext"]
    assert security["runAsNonRoot"] is True and security["runAsUser"] >= 10_000
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False and pod["serviceAccountName"] != "default"
    assert not {"hostNetwork", "hostIPC", "hostPID"} & set(pod)
    for container in containers(pod):
        confined = container["securityContext"]
        assert confined["allowPrivilegeEscalation"] is False
        assert confined["readOnlyRootFilesystem"] is True
        assert confined["capabilities"] == {"drop": ["ALL"]}
        assert "privileged" not in confined
    assert all({"emptyDir", "configMap", "persistentVolumeClaim"} & set(volume) for volume in pod["volumes"])


def test_what_the_image_writes_to_is_mounted(pod: dict[str, Any]) -> None:
    for container in containers(pod):
        assert {mount["mountPath"] for mount in container["volumeMounts"]} >= WRITABLE, container["name"]


def test_images_have_whole_versions(pod: dict[str, Any]) -> None:
    for container in containers(pod):
        assert re.search(r":\d+\.\d+\.\d+|@sha256:[0-9a-f]{64}$", container["image"]), container["image"]


def test_every_container_has_bounds(pod: dict[str, Any]) -> None:
    for container in containers(pod):
        for resource in ("cpu", "memory", "ephemeral-storage"):
            assert container["resources"]["requests"][resource] and container["resources"]["limits"][resource]
    for volume in pod["volumes"]:
        if "emptyDir" in volume:
            assert volume["emptyDir"]["sizeLimit"], volume["name"]


def test_a_pod_is_not_evicted_for_its_own_journal(
    manifests: list[Manifest], pod: dict[str, Any], tmp_path: Path
) -> None:
    ledger = settings_of(manifests, tmp_path).ledger
    [state] = [volume for volume in pod["volumes"] if volume["name"] == "state"]
    assert str(ledger.journal_folder).startswith("/var/lib/sluice/")
    assert size(state["emptyDir"]["sizeLimit"]) >= 1.5 * ledger.journal_max_bytes


def test_pods_store_no_files_that_other_pods_cannot_read(manifests: list[Manifest], tmp_path: Path) -> None:
    assert not settings_of(manifests, tmp_path).batches.enabled


def test_probes_have_the_specified_times(pod: dict[str, Any]) -> None:
    [gateway] = pod["containers"]
    startup, live, ready = (gateway[f"{name}Probe"] for name in ("startup", "liveness", "readiness"))
    assert startup["httpGet"]["path"] == live["httpGet"]["path"] == "/ping", "loading is not being dead"
    assert ready["httpGet"]["path"] == "/ready"
    assert startup["periodSeconds"] * startup["failureThreshold"] == 90
    assert (live["periodSeconds"], live["timeoutSeconds"]) == (10, 30)
    assert (ready["periodSeconds"], ready["timeoutSeconds"]) == (10, 10)


def test_a_pod_that_stops_has_time_for_its_last_answer(
    manifests: list[Manifest], pod: dict[str, Any], tmp_path: Path
) -> None:
    [gateway] = pod["containers"]
    word, seconds = gateway["lifecycle"]["preStop"]["exec"]["command"]
    assert word == "sleep"
    drain = settings_of(manifests, tmp_path).server.drain_seconds
    needed = int(seconds) + drain + ENGINE_STOP_TIMEOUT_S + FLUSH_TIMEOUT_S + CLOSE_TIMEOUT_S
    assert pod["terminationGracePeriodSeconds"] > needed + 10


def test_new_pods_serve_before_old_ones_go(manifests: list[Manifest]) -> None:
    spec = one(manifests, "Deployment")["spec"]
    assert spec["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
    }
    assert spec["progressDeadlineSeconds"] > Settings().engine.start_timeout_seconds
    assert one(manifests, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


def test_pods_spread_over_machines_and_zones(pod: dict[str, Any]) -> None:
    keys = {constraint["topologyKey"] for constraint in pod["topologySpreadConstraints"]}
    assert keys == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}


def test_selectors_match_the_labels_of_the_pods(manifests: list[Manifest]) -> None:
    labels = one(manifests, "Deployment")["spec"]["template"]["metadata"]["labels"].items()
    selectors = {
        "Deployment": lambda s: s["selector"]["matchLabels"],
        "PodDisruptionBudget": lambda s: s["selector"]["matchLabels"],
        "NetworkPolicy": lambda s: s["podSelector"]["matchLabels"],
        "Service": lambda s: s["selector"],
        "InferencePool": lambda s: s["selector"]["matchLabels"],
    }
    for manifest in manifests:
        if manifest["kind"] in selectors:
            assert selectors[manifest["kind"]](manifest["spec"]).items() <= labels, manifest["kind"]
        if manifest["kind"] == "ServiceMonitor":
            service = one(manifests, "Service")
            assert (
                manifest["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
            )
            [gateway] = one(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
            assert manifest["spec"]["endpoints"][0]["targetPort"] in {p["name"] for p in gateway["ports"]}


def test_the_network_is_closed_but_for_what_is_needed(manifests: list[Manifest]) -> None:
    policy = one(manifests, "NetworkPolicy")["spec"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    callers, prometheus = policy["ingress"]
    assert callers["from"] and callers["ports"] == [{"port": "http"}], "not the admin port"
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    assert prometheus == {"from": [monitoring], "ports": [{"port": "admin"}]}
    assert all(rule["to"] and rule["ports"] for rule in policy["egress"])
    blocks = [to["ipBlock"] for rule in policy["egress"] for to in rule["to"] if "ipBlock" in to]
    dns = {"cidr": "169.254.20.10/32"}
    assert all(block == dns or "169.254.169.254/32" in block["except"] for block in blocks)


def test_no_secret_stands_in_a_manifest(manifests: list[Manifest], pod: dict[str, Any]) -> None:
    assert not [manifest for manifest in manifests if manifest["kind"] == "Secret"]
    for container in containers(pod):
        for variable in container["env"]:
            if re.search(r"_KEY$|_TOKEN$|STATE__URL|LEDGER__URL", variable["name"]):
                assert "secretKeyRef" in variable["valueFrom"], variable["name"]


def test_the_pods_configuration_is_one_the_gateway_takes(manifests: list[Manifest], tmp_path: Path) -> None:
    settings = settings_of(manifests, tmp_path)
    assert settings.auth.enabled and settings.server.host == "0.0.0.0" and settings.server.port == 8000
    assert settings.server.ping == "alive"
    [gateway] = one(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in gateway["ports"]}
    assert ports == {"http": settings.server.port, "admin": settings.server.admin_port}
    routing = yaml.safe_load(one(manifests, "ConfigMap")["data"]["routing.yaml"])
    for route in routing["routes"].values():
        assert {backend["name"] for backend in route["backends"]} <= set(settings.backends)


@pytest.mark.parametrize("overlay", AUTOSCALED)
def test_a_fleet_shares_its_state(overlay: str) -> None:
    """With an optional reference, a pod could use a file of its own, with its own keys and limits."""
    [container] = one(rendered(overlay)[1], "Deployment")["spec"]["template"]["spec"]["containers"]
    references = {v["name"]: v["valueFrom"]["secretKeyRef"] for v in container["env"] if "valueFrom" in v}
    for name in ("SLUICE_STATE__URL", "SLUICE_LEDGER__URL", "SLUICE_ADMIN_KEY"):
        assert not references[name].get("optional")


@pytest.mark.parametrize("overlay", AUTOSCALED)
def test_every_secret_key_in_use_is_in_the_external_secret(overlay: str) -> None:
    manifests = rendered(overlay)[1]
    brought = {row["secretKey"] for row in one(manifests, "ExternalSecret")["spec"]["data"]}
    pod = one(manifests, "Deployment")["spec"]["template"]["spec"]
    used = {
        v["valueFrom"]["secretKeyRef"]["key"] for c in containers(pod) for v in c["env"] if "valueFrom" in v
    }
    assert used <= brought


@pytest.mark.parametrize("overlay", AUTOSCALED)
def test_a_pod_has_as_many_gpus_as_its_engine_takes(overlay: str, tmp_path: Path) -> None:
    manifests = rendered(overlay)[1]
    [container] = one(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
    engine = settings_of(manifests, tmp_path).engine
    assert engine.kind == "vllm"
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert gpus == engine.tensor_parallel_size * engine.pipeline_parallel_size
    # The engine's scheduling loop is sensitive to CPU: two cores, and one more for each GPU.
    assert int(container["resources"]["requests"]["cpu"]) >= 2 + gpus
    shm = [
        v for v in one(manifests, "Deployment")["spec"]["template"]["spec"]["volumes"] if v["name"] == "shm"
    ]
    assert shm[0]["emptyDir"]["medium"] == "Memory"
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]


@pytest.mark.parametrize("overlay", AUTOSCALED)
def test_the_model_is_there_before_the_engine_starts(overlay: str) -> None:
    pod = one(rendered(overlay)[1], "Deployment")["spec"]["template"]["spec"]
    [fetch], [gateway] = pod["initContainers"], pod["containers"]
    assert fetch["args"] == ["models", "fetch"]
    names = ("SLUICE_ENGINE__MODEL", "HF_HOME", "SLUICE_WEIGHTS__CACHE_FOLDER")
    fetched, served = ({v["name"]: v.get("value") for v in c["env"]} for c in (fetch, gateway))
    assert {n: fetched[n] for n in names} == {n: served[n] for n in names}


@pytest.mark.parametrize("overlay", AUTOSCALED)
def test_scaling_looks_at_the_queue_and_at_kv_memory_and_never_at_cpu(overlay: str) -> None:
    manifests = rendered(overlay)[1]
    scaled = one(manifests, "ScaledObject")["spec"]
    assert scaled["scaleTargetRef"]["name"] == one(manifests, "Deployment")["metadata"]["name"]
    assert "replicas" not in one(manifests, "Deployment")["spec"], "two owners of one number"
    assert {trigger["type"] for trigger in scaled["triggers"]} == {"prometheus"}
    queries = " ".join(trigger["metadata"]["query"] for trigger in scaled["triggers"])
    names = set(re.findall(r"(?:sluice_|vllm:)[a-z_]+", queries))
    assert names == {"sluice_admission_queue_depth", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"}
    assert all(t["metadata"]["ignoreNullValues"] == "false" for t in scaled["triggers"]), (
        "no news is not no load"
    )
    assert scaled["minReplicaCount"] <= scaled["fallback"]["replicas"] <= scaled["maxReplicaCount"]
    behavior = scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert (
        behavior["scaleDown"]["stabilizationWindowSeconds"]
        > behavior["scaleUp"]["stabilizationWindowSeconds"]
    )


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize("overlay", AUTOSCALED)
def test_each_query_of_the_scaler_gives_one_number_for_all_gateways(overlay: str, tmp_path: Path) -> None:
    """Three pods: 4 + 2 requests wait in two gateways, 1 in an engine; KV usage is 0.5, 0.9 and 0.1."""
    queue, kv = (
        t["metadata"]["query"] for t in one(rendered(overlay)[1], "ScaledObject")["spec"]["triggers"]
    )
    labels = 'namespace="sluice"'
    series = [
        f'sluice_admission_queue_depth{{{labels}, pod="a", backend="local", class="normal"}} 4',
        f'sluice_admission_queue_depth{{{labels}, pod="b", backend="local", class="high"}} 2',
        f'vllm:num_requests_waiting{{{labels}, pod="c", model_name="m"}} 1',
        *(
            f'vllm:kv_cache_usage_perc{{{labels}, pod="{pod}", model_name="m"}} {used}'
            for pod, used in (("a", 0.5), ("b", 0.9), ("c", 0.1))
        ),
        'vllm:kv_cache_usage_perc{namespace="others", pod="x"} 1',
    ]
    inputs = [
        {"series": line.rpartition(" ")[0], "values": f"{line.rpartition(' ')[2]}x5"} for line in series
    ]
    expected = [(queue, 7), (kv, 1.5)]
    asked = [
        {"expr": e, "eval_time": "1m", "exp_samples": [{"labels": "{}", "value": v}]} for e, v in expected
    ]
    file = tmp_path / "queries.yaml"
    test = {"interval": "1m", "input_series": inputs, "promql_expr_test": asked}
    file.write_text(yaml.safe_dump({"rule_files": [], "tests": [test]}))
    done = subprocess.run(
        ["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_endpoint_picker_finds_the_pods_and_their_gauges() -> None:
    """The gauges of the model server protocol have the names in the comment of inferencepool.yaml."""
    manifests = rendered("gpu")[1]
    pool, route = one(manifests, "InferencePool"), one(manifests, "HTTPRoute")
    [backend] = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])
    assert pool["spec"]["targetPorts"] == [{"number": 8000}]
    promised = re.findall(
        r"vllm:[a-z_]+", (ROOT / "components/inference-pool/inferencepool.yaml").read_text()
    )
    code = "".join(p.read_text() for p in (ROOT.parents[1] / "observability").glob("*.py"))
    assert len(promised) == 5 and all(f'"{name}"' in code for name in promised)


@pytest.mark.skipif(
    shutil.which("kustomize") is None and shutil.which("kubectl") is None, reason="kustomize is not installed"
)
def test_a_release_takes_no_image_by_its_tag_alone(tmp_path: Path) -> None:
    folder = tmp_path / "k8s"
    shutil.copytree(ROOT, folder)

    def released() -> subprocess.CompletedProcess[str]:
        command = ["sh", str(folder / "render"), "--release"]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    refused = released()
    assert refused.returncode == 1 and "without a digest: sluice:0.1.0" in refused.stderr
    for file in folder.glob("overlays/*/kustomization.yaml"):
        digest = f'newName: registry.example/sluice, digest: "sha256:{"a" * 64}"'
        file.write_text(re.sub(r"newTag: [\w.-]+", digest, file.read_text()))
    done = released()
    assert done.returncode == 0, done.stderr
