"""The manifests against the schemas that their projects publish, where ``SLUICE_SCHEMAS`` names a folder of them.

They are large and others' work, so they are not part of the repository; schemas/README.md says which files it takes
and how the last check ended.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.deploy.manifests import CUSTOM_KINDS, OVERLAYS, Manifest, one, rendered
from tests.deploy.test_compose import composed

FOLDER = os.environ.get("SLUICE_SCHEMAS")
needs_schemas = pytest.mark.skipif(
    FOLDER is None, reason="SLUICE_SCHEMAS names no folder of published schemas"
)
SMALL = """
spec:
  group: keda.sh
  names: {kind: ScaledObject}
  versions:
    - name: v1alpha1
      schema:
        openAPIV3Schema:
          type: object
          required: [spec]
          properties:
            apiVersion: {type: string}
            kind: {type: string}
            metadata: {type: object}
            spec:
              type: object
              required: [triggers]
              properties:
                triggers:
                  type: array
                  items: {type: object, x-kubernetes-preserve-unknown-fields: true, properties: {type: {type: string}}}
                port: {x-kubernetes-int-or-string: true, anyOf: [{type: integer}, {type: string}]}
                note: {type: string, nullable: true}
"""


def closed(schema: Any) -> Any:
    """As an API server reads a structural schema with strict field validation: unknown fields are faults."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: closed(part) for name, part in schema.items()}
    if "properties" in made and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    if made.get("x-kubernetes-int-or-string"):
        made = {name: part for name, part in made.items() if name != "anyOf"} | {
            "type": ["integer", "string"]
        }
    if made.get("nullable") is True:
        made["type"] = [made["type"], "null"]
    return made


def schemas_of(definition: Manifest) -> dict[str, Any]:
    """A custom resource definition's schemas by ``apiVersion kind``."""
    spec = definition["spec"]
    found = {}
    for version in spec["versions"]:
        schema = closed(version["schema"]["openAPIV3Schema"])
        schema["properties"]["metadata"] = {"type": "object"}
        found[f"{spec['group']}/{version['name']} {spec['names']['kind']}"] = schema
    return found


def faults(schema: Any, value: Any) -> list[str]:
    found = jsonschema.Draft202012Validator(schema).iter_errors(value)
    return [f"{list(error.path)}: {error.message}" for error in found]


def published() -> dict[str, Any]:
    assert FOLDER is not None
    found: dict[str, Any] = {}
    for path in Path(FOLDER).glob("*.yaml"):
        for definition in yaml.safe_load_all(path.read_text()):
            found |= schemas_of(definition)
    return found


def not_published(own: Any, schema: Any, path: str) -> Iterator[str]:
    """Fields that the project's own schema allows and the published one does not know."""
    for name, part in own.get("properties", {}).items():
        known = schema.get("properties", {})
        if name in known:
            yield from not_published(part, known[name], f"{path}.{name}")
        elif schema.get("additionalProperties") is False:
            yield f"{path}.{name}"
    if "items" in own:
        yield from not_published(own["items"], schema.get("items", {}), f"{path}[]")


@needs_schemas
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_custom_resource_is_valid_by_its_projects_schema(overlay: str) -> None:
    schemas = published()
    for manifest in rendered(overlay)[1]:
        key = f"{manifest['apiVersion']} {manifest['kind']}"
        if key in CUSTOM_KINDS:
            assert faults(schemas[key], manifest) == [], key


@needs_schemas
def test_the_projects_own_schemas_know_no_field_that_is_not_published() -> None:
    schemas = published()
    for key, own in CUSTOM_KINDS.items():
        assert list(not_published(own, schemas[key]["properties"]["spec"], key)) == []


@needs_schemas
def test_the_compose_file_is_valid_by_the_specifications_schema() -> None:
    schema = json.loads((Path(str(FOLDER)) / "compose-spec.json").read_text())
    found = jsonschema.Draft7Validator(schema).iter_errors(composed())
    assert [f"{list(error.path)}: {error.message}" for error in found] == []


def test_a_published_schema_finds_what_is_wrong() -> None:
    [(key, schema)] = schemas_of(yaml.safe_load(SMALL)).items()
    good: dict[str, Any] = {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": "a"},
    }
    assert key == "keda.sh/v1alpha1 ScaledObject"
    spec = {"triggers": [{"type": "cpu", "whatever": 1}], "port": "http", "note": None}
    assert faults(schema, {**good, "spec": spec}) == []
    for wrong in ({}, {**spec, "trigers": []}, {**spec, "port": 1.5}, {**spec, "triggers": [{"type": 1}]}):
        assert faults(schema, {**good, "spec": wrong})
    assert faults(schema, one(rendered(OVERLAYS[-1])[1], "ScaledObject")), "the small one knows fewer fields"
    assert list(not_published({"properties": {"new": {}}}, schema["properties"]["spec"], "spec")) == [
        "spec.new"
    ]
