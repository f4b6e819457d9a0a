"""The rendered manifests, and the checks of their form."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

ROOT = Path(__file__).parents[2] / "deploy" / "k8s"
OVERLAYS = sorted(path.name for path in (ROOT / "overlays").iterdir())
# The oldest that knows every field, and the newest that the validator knows.
KUBERNETES = ("1.31", kubernetes_validate.latest_version())
_CUSTOM = yaml.safe_load((Path(__file__).parent / "schemas" / "custom.yaml").read_text())

CUSTOM_KINDS: dict[str, Any] = _CUSTOM["kinds"]

Manifest = dict[str, Any]


def inputs_digest() -> str:
    """As deploy/k8s/render computes it."""
    files = [
        p for name in ("base", "components", "overlays") for p in (ROOT / name).rglob("*") if p.is_file()
    ]
    names = sorted(str(path.relative_to(ROOT)) for path in files)
    lines = [f"{hashlib.sha256((ROOT / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def rendered(overlay: str) -> tuple[str, list[Manifest]]:
    """The digest in the file's head, and its manifests."""
    text = (ROOT / "rendered" / f"{overlay}.yaml").read_text()
    found = re.search(r"from inputs ([0-9a-f]{64})", text.splitlines()[0])
    assert found, text.splitlines()[0]
    return found[1], list(yaml.safe_load_all(text))


def one(manifests: list[Manifest], kind: str) -> Manifest:
    [found] = [manifest for manifest in manifests if manifest["kind"] == kind]
    return found


def faults(manifest: Manifest) -> list[str]:
    """What is wrong with a manifest's form; unknown fields are."""
    key = f"{manifest['apiVersion']} {manifest['kind']}"
    if key in CUSTOM_KINDS:
        schema = {**CUSTOM_KINDS[key], "definitions": _CUSTOM["definitions"]}
        found = jsonschema.Draft202012Validator(schema).iter_errors(manifest["spec"])
        return [f"{key}: {list(error.path)}: {error.message}" for error in found]
    told = []
    for version in KUBERNETES:
        try:
            kubernetes_validate.validate(manifest, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            told.append(f"{key}: {version}: {error}")
    return told
