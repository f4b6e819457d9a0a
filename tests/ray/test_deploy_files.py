"""The files of deploy/ray: valid, and consistent with the application."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from pydantic import ValidationError
from ray.serve import Application
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve.schema import ServeDeploySchema

from gateway.config.errors import ConfigError
from gateway.config.settings import Settings, load_settings
from ops.ray.application import Arguments, application, make_application
from ops.ray.port import ClusterPlace
from tests.deploy.manifests import faults

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "ray"
SERVICE, CONFIG_MAP, POLICY = yaml.safe_load_all((FOLDER / "rayservice.yaml").read_text())
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
GROUPS = {group["groupName"]: group for group in CLUSTER["workerGroupSpecs"]}
TEMPLATES = [CLUSTER["headGroupSpec"]["template"], *(group["template"] for group in GROUPS.values())]
PODS = [template["spec"] for template in TEMPLATES]
SERVE_FILES = [SERVICE["spec"]["serveConfigV2"], (FOLDER / "serve.yaml").read_text()]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """The settings of the ConfigMap, as the replicas read them."""
    path = tmp_path / "sluice.yaml"
    path.write_text(CONFIG_MAP["data"]["sluice.yaml"])
    return load_settings(path, {})


def test_the_service_has_the_form_of_its_kind() -> None:
    assert faults(SERVICE) == []
    [fault] = faults({**SERVICE, "spec": {**SERVICE["spec"], "upgradeStrateg": {}}})
    assert "upgradeStrateg" in fault


@pytest.mark.parametrize("text", SERVE_FILES)
def test_serve_takes_the_configuration_and_the_application_its_arguments(text: str) -> None:
    [application] = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
    assert application.import_path == "ops.ray.application:application"
    arguments = Arguments.model_validate(application.args)
    assert arguments.config == "/etc/sluice/sluice.yaml"
    assert application.name == "sluice"


def test_further_engines_are_refused_however_the_application_is_made(settings: Settings) -> None:
    several = settings.model_copy(update={"engines": {"other": settings.engine}})
    with pytest.raises(ConfigError, match="deploy an application for each engine"):
        make_application(several, ClusterPlace("/sluice.yaml", "/", "sluice"))


def test_serve_builds_the_application_of_its_arguments(tmp_path: Path) -> None:
    path = tmp_path / "sluice.yaml"
    path.write_text(CONFIG_MAP["data"]["sluice.yaml"])
    built = call_user_app_builder_with_args_if_necessary(application, {"config": str(path), "version": "2"})
    assert isinstance(built, Application)
    with pytest.raises(ValidationError, match="confgi"):
        application({"confgi": str(path)})


@pytest.mark.parametrize("pod", PODS)
def test_pods_are_valid_and_keep_the_restricted_standard(pod: Mapping[str, Any]) -> None:
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod}
    kubernetes_validate.validate(manifest, "1.33", strict=True)
    assert pod["securityContext"]["runAsNonRoot"]
    [container] = pod["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert re.fullmatch(r"sluice-ray:\d+\.\d+\.\d+", container["image"])
    assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]


def test_rays_own_ports_are_open_to_the_cluster_and_its_operator_alone() -> None:
    """Ray does not authenticate: an open port of Ray is a shell on every node."""
    kubernetes_validate.validate(POLICY, "1.33", strict=True)
    spec = POLICY["spec"]
    labels = spec["podSelector"]["matchLabels"]
    for template in TEMPLATES:
        assert labels.items() <= template["metadata"]["labels"].items()
    assert set(spec["policyTypes"]) == {"Ingress", "Egress"}
    for rule in spec["ingress"]:
        [source] = rule["from"]
        if source == {"podSelector": {"matchLabels": labels}}:
            continue
        operator = source.get("podSelector", {}).get("matchLabels", {}).get("app.kubernetes.io/name")
        allowed = {8000, 8265} if operator == "kuberay-operator" else {8000, 8080}
        assert {port["port"] for port in rule["ports"]} <= allowed
    blocks = [to["ipBlock"] for rule in spec["egress"] for to in rule["to"] if "ipBlock" in to]
    assert all(
        block["cidr"] == "169.254.20.10/32" or block["except"] == ["169.254.169.254/32"] for block in blocks
    )


def test_the_image_and_the_cluster_have_the_same_version_of_ray() -> None:
    pinned = re.search(r"'ray\[serve\]==([0-9.]+)'", (FOLDER / "Dockerfile").read_text())
    assert pinned
    assert pinned[1] == CLUSTER["rayVersion"]


def test_pods_live_longer_than_their_last_answers(settings: Settings) -> None:
    for group in GROUPS.values():
        grace = group["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace > settings.ray.drain_seconds
    assert SERVICE["spec"]["rayClusterDeletionDelaySeconds"] > settings.ray.drain_seconds


def test_replicas_store_no_files_that_other_nodes_cannot_read(settings: Settings) -> None:
    assert not settings.batches.enabled


def test_the_cluster_has_room_for_all_replicas(settings: Settings) -> None:
    ray, engines, gateways = settings.ray, GROUPS["engines"], GROUPS["gateways"]
    assert settings.ray.application == "sluice"
    assert engines["maxReplicas"] >= ray.engines_max
    assert gateways["maxReplicas"] >= ray.gateways_max
    limits = engines["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == str(settings.engine.tensor_parallel_size)
    assert float(limits["cpu"]) >= ray.engine_cpus


def test_no_password_stands_in_the_files() -> None:
    for pod in PODS:
        for variable in pod["containers"][0]["env"]:
            assert "secretKeyRef" in variable.get("valueFrom", {}) or variable["name"].startswith("RAY_")
    assert "://" not in CONFIG_MAP["data"]["sluice.yaml"].replace("hf://", "")
