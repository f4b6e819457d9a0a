"""Builds a Bedrock backend from its section of the configuration."""

import importlib.util
from collections.abc import Callable, Sequence

import structlog

from budgeting.estimating import EstimatingCounter
from budgeting.values import Message
from gateway.backends.bedrock.backend import (
    FEATURES,
    BedrockBackend,
    BedrockEmbeddings,
    BedrockReranker,
)
from gateway.backends.bedrock.invoked import family_of, reranks
from gateway.backends.bedrock.models import cacheable_from, takes_prefill, takes_schemas
from gateway.backends.bedrock.request import ConverseWriter
from gateway.backends.bedrock.transport import Transport
from gateway.config.backends import BedrockSection
from gateway.config.errors import ConfigError
from gateway.contracts.features import Feature
from resilience.failures import BackendFailure


def make_bedrock(
    name: str,
    section: BedrockSection,
    *,
    clock: Callable[[], float],
    without: frozenset[Feature] = frozenset(),
) -> BedrockBackend:
    """Build the backend without the features ``without``; nothing connects yet.

    Raises ConfigError if boto3 is not installed.
    """
    if importlib.util.find_spec("boto3") is None:
        raise ConfigError(f"backends.{name}: kind bedrock needs boto3: pip install 'sluice-gateway[bedrock]'")
    counter = EstimatingCounter()
    minimum = cacheable_from(section.model_id, section.cache_points)
    log = structlog.get_logger("gateway.bedrock").bind(backend=name)

    features = FEATURES - without
    if takes_schemas(section.model_id):
        features |= {Feature.RESPONSE_FORMAT} - without

    def worth_caching(system: Sequence[Message]) -> bool:
        return minimum is not None and counter.estimate(section.model_id, system).expected >= minimum

    def failed(region: str, failure: BackendFailure) -> None:
        log.info("region failed", region=region, failure=failure.kind.value, reason=str(failure))

    make: type[BedrockBackend] = BedrockReranker if reranks(section.model_id) else BedrockBackend
    if family_of(section.model_id) is not None:
        make = BedrockEmbeddings
    return make(
        name,
        section,
        writer=ConverseWriter(section.model_id, worth_caching, section.guardrail),
        transport=Transport(section, clock=clock, on_failure=failed),
        counter=counter,
        prefill=takes_prefill(section.model_id, section.prefill),
        features=section.unknown_fields.features
        | (features if section.features is None else features & frozenset(section.features)),
        clock=clock,
    )
