"""Checks whether the engine can run a request; the client calls it.

The gateway's contracts bound each field of sampling. Checked here is what depends on the model, what a
checkpoint's own defaults may set, and what this engine bounds more narrowly.
"""

import math

from engine.errors import InvalidGrammar, InvalidSampling, NoPromptTokens, PromptTooLong, UnknownToken
from engine.values import EngineInfo, GenerationRequest, SamplingParams

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
    _check_sampling(request.sampling, info.vocab_size)


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise InvalidSampling(f"temperature must be finite and not negative, not {sampling.temperature}")
    if not 0 < sampling.top_p <= 1:
        raise InvalidSampling(f"top_p must be above 0 and at most 1, not {sampling.top_p}")
    if not 0 <= sampling.min_p <= 1:
        raise InvalidSampling(f"min_p must be from 0 to 1, not {sampling.min_p}")
    if not 0.01 <= sampling.repetition_penalty <= 100:  # so that no logit leaves float32
        raise InvalidSampling(
            f"repetition_penalty must be from 0.01 to 100, not {sampling.repetition_penalty}"
        )
    biased = [token for token, _ in sampling.logit_bias]
    for name, tokens in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", biased)):
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise InvalidSampling(f"{name} has token id {token}; allowed: below {vocab_size}")
    if (shape := sampling.structured) is not None and len(shape.spec) > MAX_SPEC_CHARS:
        raise InvalidGrammar(
            f"the {shape.kind.value} has {len(shape.spec)} characters; allowed: {MAX_SPEC_CHARS}"
        )
