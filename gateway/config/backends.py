"""The backends' sections of the configuration, distinguished by ``kind``."""

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from gateway.config.section import AffinitySection, Attempts, Seconds, Section
from gateway.contracts.features import Feature

Usd = Annotated[float, Field(ge=0, le=1_000_000)]


class PriceConfig(Section):
    """US dollars per million tokens; cached tokens cost as input tokens when unset."""

    input_usd_per_million: Usd
    output_usd_per_million: Usd
    cached_usd_per_million: Usd | None = None


class LegLimitConfig(Section):
    """Limits of one backend as a fallback target; unset: no limit."""

    max_concurrency: Annotated[int, Field(ge=1, le=100_000)] | None = None
    max_spend_usd_per_minute: Annotated[float, Field(gt=0, le=1_000_000)] | None = None


class FallbackSection(Section):
    """The fallback chain, for all routes together."""

    limits: dict[str, LegLimitConfig] = Field(default={})


class HedgeSection(Section):
    """When a request without a first token is also sent to a second worker; docs/workers.md."""

    enabled: bool = False
    quantile: Annotated[float, Field(ge=0.5, le=0.999)] = 0.99
    min_ms: Annotated[float, Field(ge=1, le=600_000)] = 50.0
    max_share: Annotated[float, Field(gt=0, le=0.5)] = 0.05


BaseUrl = Annotated[str, Field(pattern=r"^https?://[^/?#@\s]+(/[^?#\s]*)?$")]
Path = Annotated[str, Field(pattern=r"^/[^?#\s]*$")]


class UnknownFields(StrEnum):
    """What becomes of fields of OpenAI's bodies that Sluice does not know."""

    REFUSE = "refuse"
    DROP = "drop"
    PASS = "pass"

    @property
    def features(self) -> frozenset[Feature]:
        """What a backend takes by this."""
        taken = [Feature.UNKNOWN_FIELDS, Feature.FIELDS_PASSED]
        return frozenset(taken[: list(UnknownFields).index(self)])


RefuseOrDrop = Literal[UnknownFields.REFUSE, UnknownFields.DROP]


class EngineBackend(Section):
    """The engine in process, as a backend."""

    kind: Literal["engine"]
    unknown_fields: RefuseOrDrop = UnknownFields.REFUSE
    price: PriceConfig | None = None


class OpenAIBackend(AffinitySection):
    """A pool of remote workers that speak OpenAI's contract; docs/workers.md explains each key.

    The timeouts are for a worker that answers within seconds when it is not overloaded. ``keepalive_seconds``
    is under the five seconds after which uvicorn, vLLM's server, closes an idle connection.
    """

    kind: Literal["openai"]
    base_urls: Annotated[list[BaseUrl], Field(min_length=1, max_length=256)]
    model: Annotated[str, Field(min_length=1)]
    dialect: Literal["auto", "vllm", "sluice", "openai"] = "auto"
    prompt: Literal["auto", "messages", "token_ids"] = "auto"
    features: list[Feature] | None = None
    unknown_fields: UnknownFields | None = None
    adapters: dict[str, str] = Field(default_factory=dict)
    load_adapters: bool = False
    adapters_folder: Path | None = None
    max_loaded_adapters: Annotated[int, Field(ge=1, le=10_000)] = 8
    api_key_env: str | None = None
    send_priority: bool = False
    share_prefix_across_tenants: bool = False
    max_running: Annotated[int, Field(ge=0, le=100_000)] = 0
    max_connections: Annotated[int, Field(ge=1, le=65_536)] = 512
    max_attempts: Attempts = 3
    connect_timeout_seconds: Seconds = 2.0
    first_token_timeout_seconds: Seconds = 60.0
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
    def unknown_features(self) -> frozenset[Feature]:
        """By default vLLM workers get fields that Sluice does not know, and other workers' are refused."""
        by_dialect = UnknownFields.PASS if self.dialect in ("auto", "vllm") else UnknownFields.REFUSE
        return (self.unknown_fields or by_dialect).features

    @model_validator(mode="after")
    def _workers_can_load(self) -> Self:
        """Only vLLM has endpoints to load adapters."""
        if self.load_adapters and self.dialect not in ("auto", "vllm"):
            raise ValueError(
                f"load_adapters: workers of dialect {self.dialect!r} load none for us;"
                " allowed: 'vllm' or 'auto'"
            )
        return self

    @model_validator(mode="after")
    def _urls_differ(self) -> Self:
        """Each worker is named once."""
        bare = [url.rstrip("/") for url in self.base_urls]
        if len(set(bare)) != len(bare):
            raise ValueError("base_urls: a worker is named twice; name each once")
        return self


Region = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,32}$")]


class BedrockGuardrail(Section):
    """A guardrail of the account."""

    id: Annotated[str, Field(min_length=1, max_length=2048)]
    version: Annotated[str, Field(pattern=r"^([1-9][0-9]{0,7}|DRAFT)$")]


class BedrockSection(Section):
    """A model of Amazon Bedrock; what each key does is in docs/bedrock.md.

    Bedrock may think for long before the first byte of a long prompt's answer: the read timeout covers that.
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
        """Each region is named once."""
        if len({self.region, *self.regions}) != 1 + len(self.regions):
            raise ValueError("regions: a region is named twice; region is asked first, regions after it")
        return self


BackendConfig = Annotated[EngineBackend | OpenAIBackend | BedrockSection, Field(discriminator="kind")]


def default_backends() -> dict[str, BackendConfig]:
    """The engine in process alone."""
    return {"local": EngineBackend(kind="engine")}
