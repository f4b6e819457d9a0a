"""The sections of backends, one class for each ``kind``, and of the fallback chain."""

import re
from enum import StrEnum
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from gateway.config.section import AffinitySection, Attempts, Seconds, Section
from gateway.contracts.features import Feature

Usd = Annotated[float, Field(ge=0, le=1_000_000)]


class PriceConfig(Section):
    """US dollars per million tokens; cached tokens and written ones cost as input tokens when unset."""

    input_usd_per_million: Usd
    output_usd_per_million: Usd
    cached_usd_per_million: Usd | None = None
    cache_write_usd_per_million: Usd | None = None


class LegLimitConfig(Section):
    """Limits of one backend as a fallback target; unset: no limit."""

    max_concurrency: Annotated[int, Field(ge=1, le=100_000)] | None = None
    max_spend_usd_per_minute: Annotated[float, Field(gt=0, le=1_000_000)] | None = None


class FallbackSection(Section):
    """The limits of fallback targets by backend, shared by all routes."""

    limits: dict[str, LegLimitConfig] = Field(default={})


class HedgeSection(Section):
    """When a request without a first token is also sent to a second worker; see docs/workers.md."""

    enabled: bool = False
    quantile: Annotated[float, Field(ge=0.5, le=0.999)] = 0.99
    min_ms: Annotated[float, Field(ge=1, le=600_000)] = 50.0
    max_share: Annotated[float, Field(gt=0, le=0.5)] = 0.05


def _with_a_host(url: str) -> str:
    """Refuse an address with an invalid host or port. Raises ValueError."""
    try:
        parts = urlsplit(url)
        if parts.hostname and parts.port != 0:
            return url
    except ValueError:
        pass
    raise ValueError(f"has no valid host and port; allowed: a port from 1 to 65535; given: {url[:60]!r}")


BaseUrl = Annotated[str, Field(pattern=r"^https?://[^/?#@\s]+(/[^?#\s]*)?$"), AfterValidator(_with_a_host)]
Path = Annotated[str, Field(pattern=r"^/[^?#\s]*$")]


class UnknownFields(StrEnum):
    """What happens to fields of a request body that Sluice does not know."""

    REFUSE = "refuse"
    DROP = "drop"
    PASS = "pass"

    @property
    def features(self) -> frozenset[Feature]:
        taken = [Feature.UNKNOWN_FIELDS, Feature.FIELDS_PASSED]
        return frozenset(taken[: list(UnknownFields).index(self)])


HEADER_FIELDS = ("request_id", "tenant", "org", "user", "session_id")
"""Fields of a request that the value of a configured header may contain as ``{field}``."""
_HEADER_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HEADER_VALUE = re.compile(rf"(?:[ -z|~]|\{{(?:{'|'.join(HEADER_FIELDS)})\}}){{1,1024}}")
# Headers that the gateway sets itself.
_OWN_HEADERS = re.compile(
    "accept|authorization|connection|content-(length|type)|cookie|expect|host|keep-alive|prefer|te|trailer"
    "|trace(parent|state)|transfer-encoding|upgrade|user-agent|x-sluice-.*|proxy-.*"
)


def _headers(headers: dict[str, str]) -> dict[str, str]:
    """Check configured headers. Messages never contain a value, which may be a secret."""
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no header's name; allowed: letters, digits, - and _")
        if _OWN_HEADERS.fullmatch(name.lower()):
            hint = "; name the key in api_key_env or api_key_file" if name.lower() == "authorization" else ""
            raise ValueError(f"{name!r} is written by the gateway{hint}")
        if not _HEADER_VALUE.fullmatch(value) or value != value.strip():
            fields = ", ".join(f"{{{field}}}" for field in HEADER_FIELDS)
            raise ValueError(f"{name}: allowed: up to 1024 printable ASCII characters, and {fields}")
    if len({name.lower() for name in headers}) != len(headers):
        raise ValueError("a header is named twice; name each once")
    return headers


PROXY_FROM_ENVIRONMENT = "environment"
_PROXY = re.compile(r"https?://[^/?#@\s]+/?")


def _proxy(proxy: str | None) -> str | None:
    """Check a proxy's URL. Messages never contain it, because it may contain a password."""
    if proxy not in (None, PROXY_FROM_ENVIRONMENT) and not _PROXY.fullmatch(proxy or ""):
        raise ValueError(
            "allowed: http://HOST:PORT or https://HOST:PORT without user and password, or "
            f"{PROXY_FROM_ENVIRONMENT!r}, which takes HTTPS_PROXY and NO_PROXY, user and password included"
        )
    return proxy


class TlsSection(Section):
    """How certificates of ``https://`` workers are verified, and the gateway's own client certificate."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9.:-]{1,253}$")] | None = None


RefuseOrDrop = Literal[UnknownFields.REFUSE, UnknownFields.DROP]


class EngineBackend(Section):
    """An in-process engine as a backend: the one of ``engines`` that ``engine`` names, else ``engine``."""

    kind: Literal["engine"]
    engine: str | None = None
    unknown_fields: RefuseOrDrop = UnknownFields.REFUSE
    price: PriceConfig | None = None


class OpenAIBackend(AffinitySection):
    """A pool of remote workers that serve OpenAI's API; docs/workers.md explains each key.

    Without ``model`` the pool serves the models that its workers list. The timeouts are for a worker that
    answers within seconds when it is not overloaded. ``keepalive_seconds`` is less than five seconds, after
    which uvicorn, vLLM's server, closes an idle connection.
    """

    kind: Literal["openai"]
    base_urls: Annotated[list[BaseUrl], Field(min_length=1, max_length=256)]
    model: Annotated[str, Field(min_length=1)] | None = None
    dialect: Literal["auto", "vllm", "sluice", "openai"] = "auto"
    prompt: Literal["auto", "messages", "token_ids"] = "auto"
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] | None = None
    features: list[Feature] | None = None
    unknown_fields: UnknownFields | None = None
    adapters: dict[str, str] = Field(default_factory=dict)
    load_adapters: bool = False
    adapters_folder: Path | None = None
    max_loaded_adapters: Annotated[int, Field(ge=1, le=10_000)] = 8
    api_key_env: str | None = None
    api_key_file: str | None = None
    headers: Annotated[dict[str, str], Field(max_length=32), AfterValidator(_headers)] = Field(default={})
    proxy: Annotated[str | None, AfterValidator(_proxy)] = None
    tls: TlsSection = TlsSection()
    send_priority: bool = False
    share_prefix_across_tenants: bool = False
    max_running: Annotated[int, Field(ge=0, le=100_000)] = 0
    max_connections: Annotated[int, Field(ge=1, le=65_536)] = 512
    max_attempts: Attempts = 3
    connect_timeout_seconds: Seconds = 2.0
    first_token_timeout_seconds: Seconds = 30.0
    idle_timeout_seconds: Seconds = 30.0
    total_timeout_seconds: Seconds = 600.0
    keepalive_seconds: Seconds = 4.0
    probe_path: Path | None = None
    probe_interval_seconds: Seconds = 2.0
    probe_timeout_seconds: Seconds = 2.0
    metrics_path: Path | None = "/metrics"
    metrics_interval_seconds: Seconds = 1.0
    eject_after_failures: Annotated[int, Field(ge=1, le=1000)] = 3
    eject_error_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    eject_seconds: Seconds = 2.0
    eject_max_seconds: Seconds = 60.0
    slow_start_seconds: Annotated[float, Field(ge=0, le=3600)] = 10.0
    hedge: HedgeSection = HedgeSection()
    price: PriceConfig | None = None

    @property
    def chat_limit_field(self) -> str:
        """The field of a chat's body with the answer's limit in tokens."""
        by_dialect = "max_completion_tokens" if self.dialect == "openai" else "max_tokens"
        return self.max_tokens_field or by_dialect

    @property
    def unknown_features(self) -> frozenset[Feature]:
        """The features of ``unknown_fields``; the default is pass for vLLM workers, and refuse for others."""
        by_dialect = UnknownFields.PASS if self.dialect in ("auto", "vllm") else UnknownFields.REFUSE
        return (self.unknown_fields or by_dialect).features

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        """Refuse ``load_adapters`` for dialects that have no endpoints for it, all but vLLM's; two sources of
        the API key; TLS settings that no URL would use; and a worker that is named twice.
        """
        if self.load_adapters and self.dialect not in ("auto", "vllm"):
            raise ValueError(
                f"load_adapters: workers of dialect {self.dialect!r} load none for us;"
                " allowed: 'vllm' or 'auto'"
            )
        if self.api_key_env is not None and self.api_key_file is not None:
            raise ValueError("api_key_env and api_key_file are both set; allowed: one of both")
        if self.tls.key_file is not None and self.tls.cert_file is None:
            raise ValueError("tls.key_file needs tls.cert_file, the certificate of this key")
        if self.tls != TlsSection() and not any(url.startswith("https:") for url in self.base_urls):
            raise ValueError("tls: none of base_urls is https://; leave it out, or correct base_urls")
        bare = [url.rstrip("/") for url in self.base_urls]
        if len(set(bare)) != len(bare):
            raise ValueError("base_urls: a worker is named twice; name each once")
        return self


Region = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,32}$")]


class BedrockGuardrail(Section):
    """A Bedrock guardrail of the AWS account."""

    id: Annotated[str, Field(min_length=1, max_length=2048)]
    version: Annotated[str, Field(pattern=r"^([1-9][0-9]{0,7}|DRAFT)$")]


class BedrockSection(Section):
    """A model of Amazon Bedrock; docs/bedrock.md explains each key.

    The read timeout must cover the time until the first byte of a long prompt's answer.
    """

    kind: Literal["bedrock"]
    model_id: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:/-]{1,2048}$")]
    region: Region
    regions: Annotated[list[Region], Field(max_length=16)] = Field(default_factory=list)
    endpoint_url: BaseUrl | None = None
    profile: Annotated[str, Field(min_length=1)] | None = None
    features: list[Feature] | None = None
    unknown_fields: RefuseOrDrop = UnknownFields.REFUSE
    streaming: bool = True
    max_concurrency: Annotated[int, Field(ge=1, le=256)] = 32
    max_input_tokens: Annotated[int, Field(ge=1, le=10_000_000)] = 200_000
    connect_timeout_seconds: Seconds = 2.0
    read_timeout_seconds: Seconds = 60.0
    total_timeout_seconds: Seconds = 300.0
    region_cooldown_seconds: Annotated[float, Field(ge=0, le=60)] = 10.0
    guardrail: BedrockGuardrail | None = None
    cache_points: Literal["auto"] | bool = "auto"
    prefill: bool | None = None
    price: PriceConfig | None = None

    @model_validator(mode="after")
    def _regions_differ(self) -> Self:
        if len({self.region, *self.regions}) != 1 + len(self.regions):
            raise ValueError("regions: a region is named twice; region is asked first, regions after it")
        return self


BackendConfig = Annotated[EngineBackend | OpenAIBackend | BedrockSection, Field(discriminator="kind")]
