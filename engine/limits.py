"""Checks whether the engine accepts a request; both the client and the engine call it."""

import math

from engine.errors import InvalidGrammar, InvalidSampling, NoPromptTokens, PromptTooLong, UnknownToken
from engine.values import EngineInfo, GenerationRequest, SamplingParams

MAX_LOGPROBS = 20  # most log-probabilities per token; also the limit of OpenAI and vLLM
# Longest schema, pattern or grammar. Building takes up to 4 ms per 1,000 characters (measured on one core
# with a schema of properties only), so a quarter of a second for the longest.
MAX_SPEC_CHARS = 65_536


def check_request(request: GenerationRequest, info: EngineInfo) -> None:
    """Raise a ``RequestRefused`` with the reason if ``request`` can never run on this engine."""
    prompt, partial = request.prompt_token_ids, request.partial_token_ids
    if not prompt:
        raise NoPromptTokens("the prompt has no tokens")
    if request.embed and len(prompt) > info.max_model_len:
        raise PromptTooLong(f"the text has {len(prompt)} tokens; allowed: at most {info.max_model_len}")
    if not request.embed and len(prompt) + len(partial) >= info.max_model_len:
        rest = f" and {len(partial)} of its answer" if partial else ""
        raise PromptTooLong(
            f"the prompt has {len(prompt)} tokens{rest}; "
            f"at most {info.max_model_len - 1} leave room for an answer"
        )
    for name, tokens in (("prompt", prompt), ("partial answer", partial)):
        for worst in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= worst < info.vocab_size:
                raise UnknownToken(f"the {name} has token id {worst}; allowed: 0 to {info.vocab_size - 1}")
    _check_sampling(request.sampling)
    _check_adjustments(request.sampling, info.vocab_size)


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
    numbers = (sampling.max_tokens, sampling.top_k, sampling.seed or 0, sampling.min_tokens)
    if any(not -(2**63) <= number < 2**63 for number in numbers):
        raise InvalidSampling("max_tokens, top_k, seed and min_tokens must be 64-bit integers")
    if sampling.min_tokens < 0:
        raise InvalidSampling(f"min_tokens must not be negative, not {sampling.min_tokens}")


def _check_adjustments(sampling: SamplingParams, vocab_size: int) -> None:
    if not 0 <= sampling.min_p <= 1:
        raise InvalidSampling(f"min_p must be from 0 to 1, not {sampling.min_p}")
    if not 0.01 <= sampling.repetition_penalty <= 100:  # so that no logit leaves float32
        raise InvalidSampling(
            f"repetition_penalty must be from 0.01 to 100, not {sampling.repetition_penalty}"
        )
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2 <= (value := getattr(sampling, name)) <= 2:
            raise InvalidSampling(f"{name} must be from -2 to 2, not {value}")
    for token in sampling.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise InvalidSampling(f"stop_token_ids has token id {token}; allowed: below {vocab_size}")
    for token, bias in sampling.logit_bias:
        if not 0 <= token < vocab_size:
            raise InvalidSampling(f"logit_bias has token id {token}; allowed: below {vocab_size}")
        if not -100 <= bias <= 100:
            raise InvalidSampling(f"logit_bias of token {token} must be from -100 to 100, not {bias}")
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= MAX_LOGPROBS:
        raise InvalidSampling(f"logprobs must be from 0 to {MAX_LOGPROBS}, not {sampling.logprobs}")
    if (shape := sampling.structured) is not None:
        if len(shape.spec) > MAX_SPEC_CHARS:
            raise InvalidGrammar(
                f"the {shape.kind.value} has {len(shape.spec)} characters; allowed: {MAX_SPEC_CHARS}"
            )
        if not _is_text(shape.spec):
            raise InvalidGrammar(f"the {shape.kind.value} has a lone surrogate")


def _is_text(value: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in value)
