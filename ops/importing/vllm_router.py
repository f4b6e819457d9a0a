"""Reads the arguments of vLLM's router, and the Helm values of its production stack."""

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from gateway.config.yaml_file import load_yaml
from ops.importing.values import (
    Deployment,
    ImportedSetup,
    ImportOutcome,
    UnreadableSource,
    is_address,
    values_of,
)

_D, _U, _C = ImportOutcome.DIFFERENT, ImportOutcome.UNSUPPORTED, ImportOutcome.CARRIED
_SESSION = (_D, "callers of the native contract send session_id, of OpenAI's sluice.session_id, not a header")
_AFFINITY = "a prompt goes where its beginning is cached"
_LOGIC: Mapping[str, tuple[ImportOutcome, str]] = {
    "roundrobin": (_D, "backends.<name>.affinity: false, and the least loaded worker"),
    "session": (_D, f"{_AFFINITY}, which turns of one session share"),
    "prefixaware": (_C, f"backends.<name>.affinity: {_AFFINITY}"),
    "kvaware": (_D, f"{_AFFINITY}, from what was sent there; no controller is asked"),
    "disaggregated_prefill": (_U, "prefill and decoding are not sent to different workers"),
    "priority": (_D, "backends.<name>.send_priority"),
}
# Arguments that set no value in Sluice: the outcome, and what to do instead.
ARGUMENTS: Mapping[str, tuple[ImportOutcome, str]] = {
    "session-key": _SESSION,
    "service-discovery": (_D, "workers are listed in base_urls"),
    "static-backend-health-checks": (_C, "every worker is probed, and asked for its model"),
    "static-model-types": (_D, "workers are probed by /health, whatever their models do"),
    "backend-health-check-timeout-seconds": (_D, "backends.<name>.probe_timeout_seconds"),
    "request-stats-window": (_D, "figures are in /metrics"),
    "log-stats": (_D, "figures are in /metrics"),
    "log-stats-interval": (_D, "figures are in /metrics"),
    "log-level": (_D, "sluice serve --log-level"),
    "enable-batch-api": (_D, "see docs/api.md for what is served"),
    "otel-service-name": (_D, "tracing.service_name"),
    "dynamic-config-yaml": (_D, "import that file's arguments; routes change by `sluice routes`"),
    "dynamic-config-json": (_D, "import that file's arguments; routes change by `sluice routes`"),
    "sentry-dsn": (_U, "no Sentry; spans go to tracing.otlp_endpoint"),
}


def read_arguments(words: Sequence[str]) -> ImportedSetup:
    """Read the router's arguments. Raises UnreadableSource."""
    given: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise UnreadableSource(f"{word!r} is no argument of the router; allowed: --name value")
        name, equals, value = word.removeprefix("--").partition("=")
        if not equals and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        given[name.replace("_", "-")] = value
    urls, models = (_listed(given.pop(f"static-{key}", "")) for key in ("backends", "models"))
    if not urls or len(urls) != len(models):
        raise UnreadableSource(
            f"--static-backends names {len(urls)} workers, --static-models {len(models)}; allowed: one model "
            "for each worker, separated by commas. Workers that Kubernetes finds are to be listed"
        )
    setup = ImportedSetup()
    for url, model in zip(urls, models, strict=True):
        setup.add(model, Deployment(_base(url), {"kind": "openai", "model": model}))
        setup.carried("--static-backends", f"{url} serves {model!r}")
    for pair in _listed(given.pop("static-aliases", "")):
        alias, _, model = pair.partition(":")
        if model not in setup.groups:
            setup.unsupported("--static-aliases", f"{alias!r} is of {model!r}, which no worker serves")
            continue
        setup.groups[model].aliases.append(alias)
        setup.carried("--static-aliases", f"{alias!r} is in routes.<name>.models")
    _router(setup, given, "--{}")
    return setup


def read_values(path: Path, release: str) -> ImportedSetup:
    """Read the Helm values; each model has the URL of its service in the release. Raises UnreadableSource."""
    data = load_yaml(path, UnreadableSource)
    engines = data.get("servingEngineSpec") if isinstance(data, dict) else None
    engines = engines if isinstance(engines, dict) else {}
    specs = engines.get("modelSpec")
    if not isinstance(specs, list) or not specs or not all(isinstance(one, dict) for one in specs):
        raise UnreadableSource(
            f"{path}: servingEngineSpec.modelSpec is missing or empty; allowed: a list of models"
        )
    setup = ImportedSetup()
    for number, spec in enumerate(specs):
        place = f"servingEngineSpec.modelSpec[{number}]"
        with values_of("the production stack", f"{path}: {place}"):
            _model(setup, engines, spec, release, place, path)
    if "vllmApiKey" in engines:
        setup.different("servingEngineSpec.vllmApiKey", "set the variable VLLM_API_KEY; it was not copied")
    with values_of("the production stack", f"{path}: routerSpec"):
        _router_spec(setup, data.get("routerSpec") or {})
    for key in data:
        if key not in ("servingEngineSpec", "routerSpec"):
            setup.unsupported(key, "is of the stack's other parts, which stay as they are")
    return setup


def _model(
    setup: ImportedSetup,
    engines: Mapping[str, Any],
    spec: Mapping[str, Any],
    release: str,
    place: str,
    path: Path,
) -> None:
    name, model = str(spec.get("name", "")), str(spec.get("modelURL", ""))
    if not name or not model:
        raise UnreadableSource(f"{path}: {place}: allowed: a mapping with name and modelURL")
    config = spec.get("vllmConfig") or {}
    model, *aliases = _served_names([str(one) for one in config.get("extraArgs") or ()]) or [model]
    section: dict[str, Any] = {"kind": "openai", "model": model}
    if "vllmApiKey" in engines:
        section["api_key_env"] = "VLLM_API_KEY"
    pods = None if "keda" in spec else spec.get("replicaCount", 1)
    if isinstance(most := config.get("maxNumSeqs"), int) and isinstance(pods, int):
        section["max_running"] = most * max(1, pods)
    url = f"http://{release}-{name}-engine-service:{engines.get('servicePort', 80)}"
    setup.add(model, Deployment(_base(url), section))
    setup.groups[model].aliases += aliases
    setup.different(
        place,
        f"{model!r} is at {url}, one address (and max_running) for all its pods; name each pod, with its own "
        "max_running, for affinity and load",
    )
    if rest := [str(key) for key in spec if key not in ("name", "modelURL")]:
        setup.carried(place, f"{', '.join(rest)}: of the engines, which stay as they are")


def _served_names(words: Sequence[str]) -> list[str]:
    """The names under which a ``vllm serve`` with these arguments serves its model; none: the model's own."""
    names: list[str] = []
    for number, word in enumerate(words):
        option, equals, _ = word.replace("_", "-").partition("=")
        if option == "--served-model-name":
            given = [word.partition("=")[2]] if equals else words[number + 1 :]
            names = list(takewhile(lambda one: not one.startswith("-"), given))
    return names


def _router_spec(setup: ImportedSetup, router: Mapping[str, Any]) -> None:
    known = {
        "routingLogic": "routing-logic",
        "sessionKey": "session-key",
        "engineScrapeInterval": "engine-stats-interval",
    }
    settings = {ours: str(router[key]) for key, ours in known.items() if router.get(key) not in (None, "")}
    extra = [str(one) for one in router.get("extraArgs") or ()]
    _router(setup, settings, "routerSpec ({})")
    for word in extra:
        setup.unsupported("routerSpec.extraArgs", f"{word}: import by `sluice import vllm-router -- ...`")
    for key in router:
        if key not in {*known, "extraArgs"}:
            setup.different(f"routerSpec.{key}", "how Sluice itself is deployed: docs/deployment.md")


def _router(setup: ImportedSetup, given: dict[str, str], place: str) -> None:
    """Read the router's settings, given by the names of its arguments."""
    keys: dict[str, Any] = {}
    for name, value in given.items():
        where = place.format(name)
        if name == "routing-logic":
            setup.note(where, *_LOGIC.get(value, (_U, f"{value!r} is not known")))
            keys |= {"roundrobin": {"affinity": False}, "priority": {"send_priority": True}}.get(value, {})
        elif name == "engine-stats-interval" and re.fullmatch(r"\d+", value):
            setup.different(
                where, "workers are scraped each second; set backends.<name>.metrics_interval_seconds"
            )
        elif name in ("host", "port"):
            setup.sections.setdefault("server", {})[name] = int(value) if value.isdigit() else value
            setup.carried(where, f"server.{name}")
        elif name == "otel-endpoint" and value:
            setup.sections["tracing"] = {"otlp_endpoint": value if "://" in value else f"http://{value}"}
            setup.sections["tracing"]["protocol"] = "grpc"
            setup.carried(where, "tracing.otlp_endpoint")
        else:
            setup.note(
                where, *ARGUMENTS.get(name, (_U, "has no counterpart here; see docs/configuration.md"))
            )
    setup.set_on_all(keys, "openai")
    setup.different("timeouts", "a request ends after 60 s here: routes.<name>.timeout_ms")


def _listed(text: str) -> list[str]:
    return [one.strip() for one in text.split(",") if one.strip()]


def _base(url: str) -> str:
    if not is_address(url):
        raise UnreadableSource(f"{url!r} is no worker's address; allowed: http://HOST:PORT")
    bare = url.rstrip("/")
    return bare if bare.endswith("/v1") else f"{bare}/v1"
