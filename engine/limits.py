"""Which requests the engine takes: one pure check, made by the client and again by the engine."""

import math

from engine.errors import EmptyPrompt, InvalidSampling, PromptTooLong, UnknownToken
from engine.values import EngineInfo, GenerationRequest, SamplingParams


def check_request(request: GenerationRequest, info: EngineInfo) -> None:
    """Raises the ``RequestRefused`` that tells why ``request`` can never run on this engine."""
    prompt = request.prompt_token_ids
    if not prompt:
        raise EmptyPrompt("the prompt has no tokens")
    if len(prompt) >= info.max_model_len:
        raise PromptTooLong(
            f"the prompt has {len(prompt)} tokens; at most {info.max_model_len - 1} leave room for an answer"
        )
    if min(prompt) < 0 or max(prompt) >= info.vocab_size:
        raise UnknownToken(f"the prompt has a token id outside the vocabulary of {info.vocab_size}")
    _check_sampling(request.sampling)


def _check_sampling(sampling: SamplingParams) -> None:
    if sampling.max_tokens < 1:
        raise InvalidSampling(f"max_tokens must be at least 1, not {sampling.max_tokens}")
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise InvalidSampling(f"temperature must be finite and not negative, not {sampling.temperature}")
    if not 0 < sampling.top_p <= 1:
        raise InvalidSampling(f"top_p must be above 0 and at most 1, not {sampling.top_p}")
    if sampling.top_k < 0:
        raise InvalidSampling(f"top_k must not be negative, not {sampling.top_k}")
    if "" in sampling.stop:
        raise InvalidSampling("a stop string must not be empty")
    if not all(_is_text(stop) for stop in sampling.stop):
        raise InvalidSampling("a stop string has a lone surrogate")
    numbers = (sampling.max_tokens, sampling.top_k, sampling.seed or 0, *sampling.stop_token_ids)
    if any(not -(2**63) <= number < 2**63 for number in numbers):
        raise InvalidSampling("max_tokens, top_k, seed and stop ids must be 64-bit integers")


def _is_text(value: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in value)
