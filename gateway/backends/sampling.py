"""The features that a request's sampling needs, and default values for its unset fields."""

from itertools import compress
from typing import TypeVar

from msgspec.structs import replace

from gateway.contracts.features import Feature
from gateway.contracts.values import ResponseFormat, Sampling

T = TypeVar("T")

# In the order in which `features_asked` checks the fields.
_SAMPLING_FEATURES = (
    Feature.TEMPERATURE,
    Feature.TEMPERATURE_ABOVE_1,
    Feature.TOP_P,
    Feature.TOP_K,
    Feature.MIN_P,
    Feature.SEED,
    Feature.STOP,
    Feature.N,
    Feature.PRESENCE_PENALTY,
    Feature.FREQUENCY_PENALTY,
    Feature.REPETITION_PENALTY,
    Feature.LOGIT_BIAS,
    Feature.LOGPROBS,
    Feature.ECHO,
    Feature.IGNORE_EOS,
    Feature.MIN_TOKENS,
    Feature.STOP_TOKEN_IDS,
    Feature.RESPONSE_FORMAT,
)


def features_asked(sampling: Sampling, response_format: ResponseFormat) -> frozenset[Feature]:
    """The features that a request uses, by the fields that differ from their neutral value."""
    temperature = sampling.temperature
    used = (
        temperature is not None,
        temperature is not None and temperature > 1.0,
        sampling.top_p not in (None, 1.0),
        sampling.top_k not in (None, 0, -1),
        sampling.min_p not in (None, 0.0),
        sampling.seed is not None,
        bool(sampling.stop),
        sampling.n != 1,
        sampling.presence_penalty != 0.0,
        sampling.frequency_penalty != 0.0,
        sampling.repetition_penalty != 1.0,
        bool(sampling.logit_bias),
        sampling.logprobs is not None,
        sampling.echo,
        sampling.ignore_eos,
        sampling.min_tokens > 0,
        bool(sampling.stop_token_ids),
        response_format.type != "text",
    )
    return frozenset(compress(_SAMPLING_FEATURES, used))


def filled(asked: Sampling, default: Sampling) -> Sampling:
    """The request's sampling; unset fields get the checkpoint's defaults, else neutral values."""
    return replace(
        asked,
        temperature=_first(asked.temperature, default.temperature, 1.0),
        top_p=_first(asked.top_p, default.top_p, 1.0),
        top_k=max(0, _first(asked.top_k, default.top_k, 0)),
        min_p=_first(asked.min_p, default.min_p, 0.0),
    )


def _first(asked: T | None, default: T | None, neutral: T) -> T:
    if asked is not None:
        return asked
    return default if default is not None else neutral
