"""The rendered manifests, and the checks of their form."""

from __future__ import annotations

import hashlib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

ROOT = Path(__file__).parents[2] / "deploy" / "k8s"
OVERLAYS = sorted(path.name for path in (ROOT / "overlays").iterdir())
# The oldest version that knows every field, and the newest that the validator knows.
KUBERNETES = ("1.31", kubernetes_validate.latest_version())
CUSTOM_KINDS = {
    "keda.sh/v1alpha1 ScaledObject",
    "monitoring.coreos.com/v1 ServiceMonitor",
    "inference.networking.k8s.io/v1 InferencePool",
    "gateway.networking.k8s.io/v1 HTTPRoute",
    "external-secrets.io/v1 ExternalSecret",
    "ray.io/v1 RayService",
}

Manifest = dict[str, Any]


def published(name: str) -> dict[str, Any]:
    """A schema that another project publishes; schemas/README.md names its source."""
    path = Path(__file__).parent / "schemas" / f"{name}.json"
    schema: dict[str, Any] = json.loads(path.read_text())
    return schema


def closed(schema: Any) -> Any:
    """A structural schema as an API server reads it with strict field validation: unknown fields are faults."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: closed(part) for name, part in schema.items()}
    if isinstance(made.get("properties"), dict) and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    if made.get("x-kubernetes-int-or-string"):
        made = {name: part for name, part in made.items() if name != "anyOf"} | {
            "type": ["integer", "string"]
        }
    if made.get("nullable") is True:
        made["type"] = [made["type"], "null"]
    return made


@cache
def validator(kind: str) -> jsonschema.Draft202012Validator:
    """The validator of a whole manifest of a custom kind, except its metadata."""
    schema = closed(published(kind))
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(schema)


def inputs_digest() -> str:
    """SHA-256 of all inputs, as deploy/k8s/render computes it."""
    files = [
        p for name in ("base", "components", "overlays") for p in (ROOT / name).rglob("*") if p.is_file()
    ]
    names = sorted(str(path.relative_to(ROOT)) for path in files)
    lines = [f"{hashlib.sha256((ROOT / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def rendered(overlay: str) -> tuple[str, list[Manifest]]:
    """The digest in the first line of the rendered file, and its manifests."""
    text = (ROOT / "rendered" / f"{overlay}.yaml").read_text()
    found = re.search(r"from inputs ([0-9a-f]{64})", text.splitlines()[0])
    assert found, text.splitlines()[0]
    return found[1], list(yaml.safe_load_all(text))


def one(manifests: list[Manifest], kind: str) -> Manifest:
    [found] = [manifest for manifest in manifests if manifest["kind"] == kind]
    return found


def faults(manifest: Manifest) -> list[str]:
    """The errors in a manifest's form; an unknown field is an error."""
    key = f"{manifest['apiVersion']} {manifest['kind']}"
    if key in CUSTOM_KINDS:
        found = validator(manifest["kind"]).iter_errors(manifest)
        return [f"{key}: {list(error.path)}: {error.message}" for error in found]
    errors = []
    for version in KUBERNETES:
        try:
            kubernetes_validate.validate(manifest, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            errors.append(f"{key}: {version}: {error}")
    return errors
