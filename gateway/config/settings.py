"""Configuration: one YAML file; an environment variable can override each of its keys.

Precedence, highest first: ``SLUICE_<SECTION>__<KEY>``, vLLM's usual environment variables
(``MAX_MODEL_LEN``…), the file, the defaults. A wrong key or value stops the start with a
:class:`ConfigError` that names the source, the given value and the allowed ones.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, Field, IPvAnyNetwork, ValidationError, model_validator

from gateway.config.admission import AdmissionConfig
from gateway.config.backends import BackendConfig, EngineBackend, FallbackSection, PriceConfig
from gateway.config.batches import BatchesSection
from gateway.config.chaos import ChaosSection
from gateway.config.engine import ENGINE_ENV, AdaptersConfig, EngineSection, WeightsSection
from gateway.config.errors import ConfigError
from gateway.config.images import ImagesSection
from gateway.config.ledger import LedgerConfig
from gateway.config.models import ModelName, ModelSection, model_faults, model_of
from gateway.config.ray import RaySection
from gateway.config.resilience import ResilienceSection
from gateway.config.responses import CacheConfig, ResponsesSection
from gateway.config.section import OffIsAWord, Section
from gateway.config.shadow import ShadowSection
from gateway.config.state import AuditSection, StateConfig
from gateway.config.tracing import TracingConfig
from gateway.config.volatile import VolatilePolicy
from gateway.config.yaml_file import explain, load_yaml, shown
from gateway.contracts.features import Feature, features_without
from gateway.contracts.front_headers import WORD

ENV_PREFIX = "SLUICE_"

FRONT_KEY = "SLUICE_FRONT_KEY"  # the key of another Sluice gateway, which may act for its own tenants
SEAL_KEY = "SLUICE_SEAL_KEY"  # the keys that encrypt reasoning
# Variables with the same prefix that do not override a key of the file.
RESERVED_ENV = frozenset(
    {"SLUICE_ADMIN_KEY", "SLUICE_AUDIT_KEY", SEAL_KEY, FRONT_KEY, "SLUICE_URL", "SLUICE_CONFIG"}
)


# An engine for which the configuration names no backend gets a backend of the engine's name.
EngineName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
TenantName = Annotated[str, Field(pattern=WORD)]
Origin = Annotated[str, Field(pattern=r"^(\*|https?://[^/?#@\s]+)$")]


class ServerConfig(Section):
    """The HTTP server."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    drain_seconds: Annotated[float, Field(ge=0, le=3600)] = 30.0
    lame_duck_seconds: Annotated[float, Field(ge=0, le=600)] = 0.0
    max_body_bytes: Annotated[int, Field(ge=1024, le=1 << 30)] = 4_194_304
    max_audio_bytes: Annotated[int, Field(ge=1024, le=1 << 30)] = 26_214_400
    max_bodies_bytes: Annotated[int, Field(ge=2048, le=1 << 40)] | None = None
    max_messages: Annotated[int, Field(ge=1, le=100_000)] = 2_048
    request_timeout_seconds: Annotated[float, Field(gt=0, le=86_400)] = 300.0
    log_json: bool | None = None
    ping: Literal["alive", "once_ready"] = "alive"
    admin_host: Annotated[str, Field(min_length=1)] | None = None
    admin_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    public_metrics: bool = False
    max_connections: Annotated[int, Field(ge=1, le=1_000_000)] = 4_096
    max_connections_per_address: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    trusted_proxies: Annotated[tuple[IPvAnyNetwork, ...], Field(max_length=256)] = ()
    reasoning_field: Literal["reasoning", "reasoning_content", "both"] = "reasoning"
    cors_origins: Annotated[tuple[Origin, ...], Field(max_length=64)] = ()
    console: bool = True

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        """Refuse a lame-duck time longer than the drain, which includes it; a body memory of which one
        tenant's share, a half, cannot hold the largest body; and one port for both listeners, because the
        port decides which paths a request may reach.
        """
        if self.lame_duck_seconds > self.drain_seconds:
            raise ValueError(
                f"server.lame_duck_seconds is {self.lame_duck_seconds:g}; "
                f"allowed: at most server.drain_seconds, {self.drain_seconds:g}"
            )
        if self.max_bodies_bytes is not None and self.max_bodies_bytes < 2 * self.max_body_bytes:
            raise ValueError(
                f"server.max_bodies_bytes is {self.max_bodies_bytes}; allowed: at least twice "
                f"server.max_body_bytes, {2 * self.max_body_bytes}"
            )
        if self.admin_host is not None and self.admin_port is None:
            raise ValueError("server.admin_host needs server.admin_port")
        if self.admin_port and self.admin_port == self.port:
            raise ValueError("server.admin_port is server.port; allowed: another one, or none")
        return self


class TenantBudget(Section):
    """What a tenant may spend with all its keys, in US dollars per UTC day and per calendar month."""

    usd_per_day: Annotated[float, Field(ge=0.00001, le=1_000_000)] | None = None
    usd_per_month: Annotated[float, Field(ge=0.00001, le=1_000_000)] | None = None


class AuthConfig(Section):
    """API keys. With ``enabled: false`` every caller is the local operator; keep the port on loopback then.

    With ``metrics``, ``/metrics`` also needs the key of an operator or admin. ``tenant_budgets`` apply in
    addition to the keys' budgets. The defaults apply, per process, to callers' keys without an own limit.
    """

    enabled: bool = True
    metrics: bool = False
    default_concurrent_requests: Annotated[int, Field(ge=1, le=1_000_000)] | None = 1_024
    default_requests_per_minute: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = 600_000
    default_tokens_per_minute: Annotated[int, Field(ge=1, le=1_000_000_000_000)] | None = 1_000_000_000
    default_usd_per_minute: Annotated[float, Field(ge=0.01, le=1_000_000)] | None = 1_000.0
    tenant_budgets: Annotated[dict[TenantName, TenantBudget], Field(max_length=10_000)] = Field(default={})


class RoutingSection(Section):
    """The file from which the first routing revision is made.

    ``file`` unset: ``routing.yaml`` when it names a backend, else one route over all backends.
    """

    file: str | None = None


class PromptsConfig(Section):
    """The folder of registered prompt versions, and what to do with volatile content in system messages.

    ``folder`` unset: ``prompts`` when it exists, else no versions are registered. ``token_cache_bytes``: for
    texts and ids of earlier prompts, of all tokenizers together.
    """

    folder: str | None = None
    volatile: Annotated[VolatilePolicy, OffIsAWord] = VolatilePolicy.MOVE
    openai_volatile: Annotated[VolatilePolicy, OffIsAWord] = VolatilePolicy.REPORT
    token_cache_bytes: Annotated[int, Field(ge=1 << 20, le=1 << 40)] = 128 << 20


class Settings(Section):
    """Everything that can be configured."""

    server: ServerConfig = ServerConfig()
    auth: AuthConfig = AuthConfig()
    engine: EngineSection = EngineSection()
    engines: Annotated[dict[EngineName, EngineSection], Field(max_length=64)] = Field(default={})
    weights: WeightsSection = WeightsSection()
    backends: dict[EngineName, BackendConfig] = Field(default={"local": EngineBackend(kind="engine")})
    models: Annotated[dict[ModelName, ModelSection], Field(max_length=1_000)] = Field(default={})
    state: StateConfig = StateConfig()
    images: ImagesSection = ImagesSection()
    audit: AuditSection = AuditSection()
    ledger: LedgerConfig = LedgerConfig()
    routing: RoutingSection = RoutingSection()
    prompts: PromptsConfig = PromptsConfig()
    adapters: AdaptersConfig = AdaptersConfig()
    admission: AdmissionConfig = AdmissionConfig()
    resilience: ResilienceSection = ResilienceSection()
    response_cache: CacheConfig = CacheConfig()
    responses: ResponsesSection = ResponsesSection()
    batches: BatchesSection = BatchesSection()
    fallback: FallbackSection = FallbackSection()
    shadow: ShadowSection = ShadowSection()
    tracing: TracingConfig = TracingConfig()
    chaos: ChaosSection = ChaosSection()
    ray: RaySection = RaySection()

    @model_validator(mode="before")
    @classmethod
    def _no_engine_without_a_backend(cls, data: Any) -> Any:
        """Add a backend for each of ``engines`` without one; set kind ``none`` for an unused ``engine``."""
        if not isinstance(data, dict):
            return data
        backends, engines, engine = data.get("backends"), data.get("engines"), data.get("engine", {})
        if isinstance(engines, dict) and engines and isinstance(backends, dict | None):
            wanted = isinstance(engine, dict) and {"kind", "model"} & engine.keys()
            own = backends or ({"local": {"kind": "engine"}} if wanted else {})
            on = [one.get("engine") for one in own.values() if isinstance(one, dict)]
            more = {name: {"kind": "engine", "engine": name} for name in engines if name not in on}
            backends = {**more, **own}
            data = {**data, "backends": backends}
        if not isinstance(backends, dict):
            return data
        named = any(
            not isinstance(one, dict) or (one.get("kind") in (None, "engine") and one.get("engine") is None)
            for one in backends.values()
        )
        if not backends or named or not isinstance(engine, dict) or "kind" in engine:
            return data
        return {**data, "engine": {**engine, "kind": "none"}}

    @model_validator(mode="after")
    def _engine_exists(self) -> Self:
        """Refuse a backend without its engine, and an engine without a backend or with another's model."""
        on = {name: one.engine for name, one in self.backends.items() if one.kind == "engine"}
        for name, engine in on.items():
            if engine is not None and engine not in self.engines:
                allowed = ", ".join(self.engines) or "none; leave it out"
                raise ValueError(f"backends.{name}.engine: there is no engines.{engine}; allowed: {allowed}")
            if engine is None and self.engine.kind == "none":
                raise ValueError(
                    f"backends.{name}: kind engine needs engine.kind embedded or vllm, not none; "
                    "name remote workers (kind: openai) under backends"
                )
        served = {self.engine.model_id: "engine"} if None in on.values() else {}
        for name, section in self.engines.items():
            fault = None
            if section.kind == "none":
                fault = "kind: none loads nothing; allowed: embedded or vllm"
            elif name not in on.values():
                fault = f"backends.{name} is another backend; name one of kind engine with engine: {name}"
            elif section.model_id in served:
                fault = (
                    f"{served[section.model_id]} serves {section.model_id!r} too; give one of them another "
                    "served_model_name (several GPUs for one model: sluice serve --gpus)"
                )
            elif "max_loras" in section.model_fields_set and section.max_loras:
                fault = "max_loras: adapters are loaded on `engine` alone; leave it out"
            if fault is not None:
                raise ValueError(f"engines.{name}: {fault}")
            served[section.model_id] = f"engines.{name}"
        return self

    @property
    def engine_sections(self) -> Mapping[str | None, EngineSection]:
        """The sections of the engines by name; the key of ``engine`` is ``None``."""
        return dict[str | None, EngineSection]({None: self.engine}) | self.engines

    @property
    def engines_of_backends(self) -> Mapping[str, EngineSection]:
        sections = self.engine_sections
        return {name: sections[one.engine] for name, one in self.backends.items() if one.kind == "engine"}

    @property
    def model_aliases(self) -> Mapping[str, str]:
        return {alias: model for model, section in self.models.items() for alias in section.aliases}

    def incapable(self, model: str) -> frozenset[Feature]:
        """Return the features that a model lacks, whatever its backend supports."""
        section = self.models.get(model)
        images = frozenset() if section is not None and section.images is not None else {Feature.IMAGES}
        if section is None or section.capabilities is None:
            return frozenset(images)
        return features_without(section.capabilities) | images

    @property
    def priced(self) -> bool:
        own = any(section.price for section in self.models.values())
        return own or self.ledger.prices is not None or any(map(self.price, self.backends))

    def price(self, name: str) -> PriceConfig | None:
        """Return a backend's own price, else that of its model."""
        backend = self.backends[name]
        model = model_of(backend, self.engine_sections)
        sections = (
            one for id_, one in self.models.items() if model == id_ or (not model and name in one.backends)
        )
        return backend.price or next((one.price for one in sections), None)

    @model_validator(mode="after")
    def _models_and_limits_are_of_backends(self) -> Self:
        """Refuse a name that two models have, a model that no backend serves, a limit of an unknown backend,
        and limits of money where no price counts.
        """
        fault = next(model_faults(self.models, self.backends, self.engine_sections), None)
        if fault is not None:
            raise ValueError(fault)
        if self.auth.tenant_budgets and not self.priced:
            raise ValueError(
                "auth.tenant_budgets needs a price, else it limits nothing; allowed: a price in "
                "backends.<name>.price, models.<id>.price or ledger.prices"
            )
        for name, limit in self.fallback.limits.items():
            if name not in self.backends:
                allowed = ", ".join(sorted(self.backends)) or "none"
                raise ValueError(f"fallback.limits.{name}: no such backend; allowed: {allowed}")
            unpriced = self.price(name) is None and self.ledger.prices is None
            if limit.max_spend_usd_per_minute is not None and unpriced:
                raise ValueError(
                    f"fallback.limits.{name}.max_spend_usd_per_minute needs backends.{name}.price: "
                    "what a million tokens cost"
                )
        return self


def load_settings(
    path: Path | None, environ: Mapping[str, str] = os.environ, *, base: Mapping[str, Any] | None = None
) -> Settings:
    """Read the file and the environment; without a file, ``base`` is the configuration to override.

    Raises ConfigError if a file, a key or a value is wrong.
    """
    data = deepcopy(dict(base or {})) if path is None else load_yaml(path, ConfigError)
    if not isinstance(data := {} if data is None else data, dict):
        raise ConfigError(f"{path}: must be a mapping of sections, not {type(data).__name__}")
    origins: dict[tuple[str, ...], str] = {}
    file = str(path or "defaults")
    for name in ENGINE_ENV:
        if environ.get(name):
            _put(data, ("engine", name.lower()), environ[name], name, origins, file)
    for name, value in sorted(environ.items()):
        if not name.startswith(ENV_PREFIX) or name in RESERVED_ENV:
            continue
        keys = tuple(part.lower() for part in name[len(ENV_PREFIX) :].split("__"))
        if len(keys) > 1 or keys[0] in Settings.model_fields:
            _put(data, keys, value, name, origins, file)
        else:
            _refuse_unread(name, value)
    if data.get("backends") == {} and not data.get("engines"):
        named = f"environment {origins[('backends',)]}" if ("backends",) in origins else file
        raise ConfigError(
            f"{named}: backends: is empty; allowed: one or more, or leave it out for the engine"
        )
    try:
        return Settings.model_validate(data)
    except ValidationError as error:

        def source(loc: tuple[int | str, ...]) -> str:
            # A fault that concerns several keys has no location: each of them may be at fault.
            named = [name for keys, name in origins.items() if loc and keys[: len(loc)] == loc[: len(keys)]]
            return f"environment {', '.join(named)}" if named else file

        raise ConfigError(explain(error, Settings, source)) from None


def _refuse_unread(name: str, value: str) -> None:
    """Raise ConfigError for a variable that names a key of a section with a single underscore.

    Kubernetes sets ``SLUICE_SERVER_PORT=tcp://…`` for a service ``sluice-server``; that one is ignored.
    """
    word = name[len(ENV_PREFIX) :].lower()
    for section, field in Settings.model_fields.items():
        model, key = field.annotation, word.removeprefix(f"{section}_")
        known = isinstance(model, type) and issubclass(model, BaseModel) and key in model.model_fields
        if known and key != word and not value.startswith("tcp://"):
            meant = f"{ENV_PREFIX}{section}__{key}".upper()
            raise ConfigError(f"environment {name}: is not read; allowed: {meant}, with two underscores")


def _put(
    data: dict[str, Any],
    keys: tuple[str, ...],
    value: str,
    name: str,
    origins: dict[tuple[str, ...], str],
    file: str,
) -> None:
    place: Any = data
    for number, key in enumerate(keys[:-1], start=1):
        place = place.setdefault(key, {})
        if not isinstance(place, dict):  # e.g. an empty section of the file
            other = origins.get(keys[:number])
            where = f"environment {other}" if other else file
            section = ".".join(keys[:number])
            fault = f"must be a mapping, because {name} sets a key of it; given: {shown(place)}"
            raise ConfigError(f"{where}: {section}: {fault}")
    place[keys[-1]] = _parsed(value)
    origins[keys] = name


def _parsed(value: str) -> Any:
    """Parse a variable: null, true or false, a JSON list or mapping, else a text that pydantic parses."""
    if value.lower() in ("null", "true", "false"):
        return yaml.safe_load(value)
    if value[:1] in ("[", "{"):
        with contextlib.suppress(json.JSONDecodeError):
            return json.loads(value)
    return value
