"""Writes an imported configuration as ``sluice.yaml`` and ``routing.yaml``."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from gateway.config.backends import BedrockSection, OpenAIBackend
from gateway.config.errors import ConfigError
from gateway.config.settings import ServerConfig, Settings
from gateway.config.yaml_file import explain
from gateway.routing.check import KnownNames
from gateway.routing.file import RouteConfig
from gateway.routing.revision import make_revision
from ops.importing.values import Deployment, ImportedSetup, ModelGroup, UnreadableSource

# About the longest context of hosted models; their services refuse longer requests themselves.
MAX_MODEL_LEN = 1_048_576
# Calls of one backend while no other is asked, as docs/resilience.md counts them.
CALLS = 5
LONGEST_MS = 86_400_000.0
_NOT_A_NAME = re.compile(r"[^A-Za-z0-9_.-]+")
_MODEL_NAME = re.compile(r"[!-~]{1,256}")
FILES = ("sluice.yaml", "routing.yaml")


def write(setup: ImportedSetup, folder: Path, *, source: str, force: bool) -> list[Path]:
    """Write both files; returns their paths.

    Raises ConfigError or RoutingFileError if a gateway could not start with them, UnreadableSource if there
    is nothing to write or a file exists already.
    """
    contents = configurations(setup)
    paths = [folder / name for name in FILES]
    there = [str(path) for path in paths if path.exists()]
    if there and not force:
        raise UnreadableSource(
            f"{', '.join(there)}: there already; --force replaces, --out names another folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnreadableSource(f"--out: {folder} cannot be made ({error.strerror})") from None
    for path, content in zip(paths, contents, strict=True):
        head = f"# Imported from {source}; `sluice doctor` checks it.\n"
        path.write_text(head + yaml.safe_dump(content, sort_keys=False, width=110), encoding="utf-8")
    return paths


def configurations(setup: ImportedSetup) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of both files, validated. Raises like :func:`write`."""
    groups = [group for group in setup.groups.values() if group.deployments]
    if not groups:
        raise UnreadableSource(
            "no model could be imported:\n" + "\n".join(f"{note.place}: {note.text}" for note in setup.notes)
        )
    for group in groups:
        group.deployments = [
            replace(one, section=_with_timeouts(one.section, setup.timeout_s)) for one in group.deployments
        ]
    backends: dict[str, Any] = {}
    members = {group.name: sorted(_backends(group, backends), key=lambda one: one[2]) for group in groups}
    routes: dict[str, Any] = {}
    generating: list[str] = []
    for group in groups:
        own = members[group.name]
        weights = {backend: weight for backend, weight, order in own if order == own[0][2]}
        others = [one for other in group.fallbacks for one in members.get(other, ())]
        targets = dict.fromkeys(backend for backend, _, _ in (*own, *others))
        fallback = [one for one in targets if [one] != list(weights)]
        route = _free(group.name, routes)
        generating += [route] if group.generates else []
        routes[route] = {
            "models": [one for one in (group.name, *group.aliases) if _MODEL_NAME.fullmatch(one)],
            "backends": _percent(weights),
            "fallback": fallback,
            "timeout_ms": _timeout_ms(group, len(fallback)),
        }
    engine = {"kind": "none", "max_model_len": MAX_MODEL_LEN}
    settings = {"engine": engine, "backends": backends, "routing": {"file": FILES[1]}, **setup.sections}
    longest = max(route["timeout_ms"] for route in routes.values()) / 1000
    if longest > ServerConfig().request_timeout_seconds:
        server = setup.sections.get("server", {})
        settings["server"] = {**server, "request_timeout_seconds": longest}
    routing = {"routes": routes, "openai_route": next(iter(generating or routes))}
    try:
        Settings.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(explain(error, Settings, lambda loc: FILES[0])) from None
    make_revision(1, routing, KnownNames(backends, (), None), source=FILES[1])
    return settings, routing


def _with_timeouts(section: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
    """The section with its total timeout, if any, which no shorter default for the first token cuts."""
    total_s = section.get("total_timeout_seconds", timeout_s)
    openai = section["kind"] == "openai"
    key, kind = (
        ("first_token_timeout_seconds", OpenAIBackend) if openai else ("read_timeout_seconds", BedrockSection)
    )
    longer = {key: total_s} if total_s > kind.model_fields[key].default else {}
    return {**({"total_timeout_seconds": total_s} if total_s else {}), **longer, **section}


def _timeout_ms(group: ModelGroup, fallbacks: int) -> float:
    """The route's longest time: that of all calls which a request may make, but not below the default."""
    default: float = RouteConfig.model_fields["timeout_ms"].default
    call_s = max(float(one.section.get("total_timeout_seconds", 0)) for one in group.deployments)
    return min(max(default, 1000 * call_s * (CALLS + fallbacks)), LONGEST_MS)


def _backends(group: ModelGroup, backends: dict[str, Any]) -> Iterable[tuple[str, float, int]]:
    """Add the group's backends to ``backends``; yields name, weight and order of each."""
    pools: list[tuple[Deployment, list[str]]] = []
    for one in group.deployments:
        same = replace(one, base_url=None)
        pool = next((urls for first, urls in pools if first == same), None)
        if pool is None or one.base_url is None:
            pools.append((same, [] if one.base_url is None else [one.base_url]))
        elif one.base_url not in pool:
            pool.append(one.base_url)
    for one, urls in pools:
        name = _free(group.name, backends)
        section = dict(one.section)
        backends[name] = {"kind": section.pop("kind"), **({"base_urls": urls} if urls else {}), **section}
        yield name, one.weight * max(1, len(urls)), one.order


def _percent(weights: Mapping[str, float]) -> list[dict[str, Any]]:
    """The weights as percentages that add up to 100."""
    if not any(weights.values()):
        weights = dict.fromkeys(weights, 1.0)
    total = sum(weights.values())
    shares = {name: round(100 * weight / total, 2) for name, weight in weights.items()}
    first = next(iter(shares))
    shares[first] = round(shares[first] + 100 - sum(shares.values()), 2)
    return [{"name": name, "weight": share} for name, share in shares.items()]


def _free(name: str, taken: Iterable[str]) -> str:
    """A name that is valid for backends, derived from ``name``, and not in ``taken``."""
    plain = _NOT_A_NAME.sub("-", name).strip("-._")[:48] or "model"
    numbered = (f"{plain}-{number}" for number in count(2))
    return next(name for name in chain((plain,), numbered) if name not in taken)
