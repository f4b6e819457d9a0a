"""Checks of the dependencies that need no network; the audit of vulnerabilities needs one (scripts/audit)."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import runpy
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = "sluice-gateway"
# Licences that allow the whole to be distributed under Apache-2.0, each by a word that names nothing else.
ALLOWED = (
    "apache",
    "bsd",
    "mit",
    "mpl",
    "isc",
    "psf",
    "python software foundation",
    "mozilla",
    "unlicense",
    "zlib",
)


def declared() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"]
    lines = [*PROJECT["dependencies"], *(one for extra in extras.values() for one in extra)]
    return [one for one in map(Requirement, lines) if one.name != OURS]


def installed_by_default() -> set[str]:
    """Return the names of the default dependencies and of their dependencies."""
    found: set[str] = set()
    pending = [Requirement(one) for one in PROJECT["dependencies"]]
    while pending:
        one = pending.pop()
        name = one.name.lower().replace("_", "-")
        if name in found or (one.marker is not None and not one.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        pending += [Requirement(line) for line in importlib.metadata.requires(name) or ()]
    return found


def licences(name: str) -> list[str]:
    metadata = importlib.metadata.metadata(name)
    named = [metadata.get("License-Expression") or "", (metadata.get("License") or "")[:100]]
    named += [one for one in metadata.get_all("Classifier") or () if one.startswith("License ::")]
    return [one.lower() for one in named if one]


def test_every_dependency_has_a_lower_bound_and_what_is_installed_is_within_its_range() -> None:
    for one in declared():
        if one.name.startswith("types-"):
            continue
        assert any(bound.operator in (">=", "==", "~=") for bound in one.specifier), one
        try:
            version = importlib.metadata.version(one.name)
        except importlib.metadata.PackageNotFoundError:
            continue  # an extra that this machine does not have
        assert one.specifier.contains(version, prereleases=True), f"{one}: {version} is installed"


def test_no_dependency_is_declared_by_a_url() -> None:
    assert not [one for one in declared() if one.url]


def test_what_every_installation_brings_has_a_licence_that_allows_it() -> None:
    names = installed_by_default()
    assert len(names) > len(PROJECT["dependencies"])
    for name in sorted(names):
        named = licences(name)
        assert any(word in one for one in named for word in ALLOWED), f"{name}: {named}"


LOCKS = {"light": ("embedded", "bedrock", "hub", "postgres", "redis", "s3", "sealing"), "test": ("test",)}


def required(extras: Iterable[str]) -> Iterator[Requirement]:
    """Yield the dependencies of an install with these extras, without torch, which is installed separately."""
    lines = [
        *PROJECT["dependencies"],
        *(line for extra in extras for line in PROJECT["optional-dependencies"][extra]),
    ]
    for one in map(Requirement, lines):
        if one.name == OURS:
            yield from required(one.extras)
        elif one.name != "torch":
            yield one


@pytest.mark.parametrize("name", LOCKS)
def test_the_locks_hold_every_dependency_in_its_range_with_hashes_and_name_no_index(name: str) -> None:
    text = (ROOT / "constraints" / f"{name}.txt").read_text()
    locked: dict[str, list[str]] = {}
    for entry in re.split(r"\n(?=[a-z0-9])", text.partition("\n")[2]):
        found = re.match(r"([a-z0-9.-]+)==([^ ;]+)", entry)
        assert found is not None and "--hash=sha256:" in entry, entry
        locked.setdefault(found[1], []).append(found[2])
    for one in required(LOCKS[name]):
        versions = locked.get(re.sub(r"[-_.]+", "-", one.name).lower(), [])
        assert any(one.specifier.contains(version) for version in versions), f"{one}: run make lock"
    assert "://" not in text and "torch" not in locked


SBOM = runpy.run_path(str(ROOT / "scripts" / "sbom"))


def test_the_bill_of_materials_has_everything_that_is_needed_and_is_the_same_each_time() -> None:
    made = SBOM["document"](frozenset({"embedded"}))
    assert made == SBOM["document"](frozenset({"embedded"})) and json.loads(json.dumps(made)) == made
    assert (made["bomFormat"], made["specVersion"]) == ("CycloneDX", "1.5")
    named = {one["name"] for one in made["components"]}
    assert {*installed_by_default(), "torch"} - {OURS} <= named
    refs = {one["bom-ref"] for one in [made["metadata"]["component"], *made["components"]]}
    for one in made["dependencies"]:
        assert {one["ref"], *one["dependsOn"]} <= refs
    for one in made["components"]:
        assert one["licenses"], one
        assert one["type"] == "data" or one["purl"] == f"pkg:pypi/{one['name']}@{one['version']}"


# Suffixes of data files that may come from elsewhere, and the files with them that were made here.
DATA = {".csv", ".jsonl", ".psv", ".parquet", ".txt", ".gz", ".zip", ".bin", ".js", ".css", ".woff2", ".ttf"}
OWN_DATA = {
    "constraints/light.txt", "constraints/test.txt", "gateway/bundled/console/console.css",
    "gateway/bundled/console/console.js", "gateway/bundled/console/parts.js",
    "gateway/bundled/console/playground.js", "gateway/bundled/console/records.js", "gateway/bundled/console/routing.js",
    "evaluation/adapter_regression/manga_domain.jsonl",
    "evaluation/demo_questions.jsonl", "evaluation/quantization_eval/prompts.jsonl", "models/catalogue.psv",
}  # fmt: skip


def test_every_file_of_data_is_our_own_or_listed_with_its_licence() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    if listed.returncode != 0:
        pytest.skip("this is no clone")
    files = set(listed.stdout.splitlines())
    data = {name for name in files if Path(name).suffix in DATA}
    vendored = {path: (source, licence) for path, source, licence in SBOM["VENDORED"]}
    assert data <= OWN_DATA | set(vendored) <= files
    full = {"CC-BY-4.0": "CC-BY 4.0", "Apache-2.0": "Apache License 2.0"}
    for path, (source, licence) in vendored.items():
        described = (ROOT / path).with_name("README.md").read_text(encoding="utf-8")
        section = described.partition(f"## {Path(path).name}\n")[2].partition("\n## ")[0]
        assert source in section and full[licence] in section, path


def audited(folder: Path, pip_audit: str | None) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    if pip_audit is not None:
        stand_in = folder / "pip-audit"
        stand_in.write_text(f"#!/bin/sh\n{pip_audit}\n")
        stand_in.chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}:/usr/bin:/bin"}
    return subprocess.run([ROOT / "scripts" / "audit"], env=env, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(
    ("pip_audit", "status", "word"),
    [
        (None, 2, "nothing was audited"),
        ("echo 'connection refused' >&2; exit 1", 1, "not passed"),
        ("exit 0", 0, ""),
    ],
)
def test_an_audit_that_could_not_be_made_has_not_passed(
    tmp_path: Path, pip_audit: str | None, status: int, word: str
) -> None:
    done = audited(tmp_path / "bin", pip_audit)
    assert done.returncode == status and word in done.stderr
