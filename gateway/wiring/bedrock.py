"""Builds a Bedrock backend from its section of the configuration."""

import importlib.util
from collections.abc import Callable, Sequence

import structlog

from budgeting.estimating import EstimatingCounter
from budgeting.values import Message
from gateway.backends.bedrock.backend import FEATURES, BedrockBackend
from gateway.backends.bedrock.caching import cacheable_from
from gateway.backends.bedrock.prefill import takes_prefill
from gateway.backends.bedrock.regions import Regions
from gateway.backends.bedrock.request import ConverseWriter
from gateway.backends.bedrock.transport import Access, Transport
from gateway.backends.bedrock.values import Guardrail
from gateway.config.backends import BedrockSection
from gateway.config.errors import ConfigError
from resilience.failures import BackendFailure


def make_bedrock(name: str, section: BedrockSection, *, clock: Callable[[], float]) -> BedrockBackend:
    """Build the backend; nothing connects yet. Raises ConfigError: boto3 is not installed."""
    if importlib.util.find_spec("boto3") is None:
        raise ConfigError(f"backends.{name}: kind bedrock needs boto3: pip install 'sluice-gateway[bedrock]'")
    counter = EstimatingCounter()
    minimum = cacheable_from(section.model_id, section.cache_points)
    log = structlog.get_logger("gateway.bedrock").bind(backend=name)

    def worth_caching(system: Sequence[Message]) -> bool:
        return minimum is not None and counter.estimate(section.model_id, system).expected >= minimum

    def failed(region: str, failure: BackendFailure) -> None:
        log.info("region failed", region=region, failure=failure.kind.value, reason=str(failure))

    guardrail = section.guardrail
    return BedrockBackend(
        name,
        model=section.model_id,
        writer=ConverseWriter(
            section.model_id, worth_caching, Guardrail(guardrail.id, guardrail.version) if guardrail else None
        ),
        transport=Transport(
            Access(
                endpoint_url=section.endpoint_url,
                profile=section.profile,
                connect_timeout_s=section.connect_timeout_seconds,
                read_timeout_s=section.read_timeout_seconds,
                connections=section.max_concurrency,
                streaming=section.streaming,
            ),
            Regions([section.region, *section.regions], section.region_cooldown_seconds),
            clock=clock,
            on_failure=failed,
        ),
        counter=counter,
        max_concurrency=section.max_concurrency,
        max_input_tokens=section.max_input_tokens,
        total_timeout_s=section.total_timeout_seconds,
        prefill=takes_prefill(section.model_id, section.prefill),
        features=FEATURES if section.features is None else FEATURES & frozenset(section.features),
        clock=clock,
    )
