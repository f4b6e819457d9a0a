"""A request that the engine can never run is refused before it is sent."""

import math

import pytest

from engine.errors import (
    InvalidGrammar,
    InvalidSampling,
    NoPromptTokens,
    PromptTooLong,
    RequestRefused,
    UnknownToken,
)
from engine.limits import MAX_SPEC_CHARS, check_request
from engine.values import GenerationRequest, GrammarKind, SamplingParams, StructuredOutput
from tests.engine.support import make_info

INFO = make_info(vocab_size=512, max_model_len=64)


def check(**sampling: object) -> None:
    params = SamplingParams(max_tokens=1, **sampling)  # type: ignore[arg-type]
    check_request(GenerationRequest("a", (1,), params), INFO)


@pytest.mark.parametrize(
    ("prompt", "embed", "error"),
    [
        ((), False, NoPromptTokens),
        ((5,) * 64, False, PromptTooLong),
        ((5,) * 65, True, PromptTooLong),
        ((5, 512), False, UnknownToken),
        ((-1,), False, UnknownToken),
    ],
)
def test_a_prompt_that_can_never_run_is_refused(
    prompt: tuple[int, ...], embed: bool, error: type[RequestRefused]
) -> None:
    with pytest.raises(error):
        check_request(GenerationRequest("a", prompt, SamplingParams(1), embed=embed), INFO)
    check_request(GenerationRequest("a", (5,) * (64 if embed else 63), SamplingParams(1), embed=embed), INFO)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": 1.1},
        {"min_p": -0.1},
        {"min_p": math.nan},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e-30},
        {"repetition_penalty": math.inf},
        {"stop_token_ids": (-1,)},
        {"logit_bias": ((512, 1.0),)},
        {"logit_bias": ((-1, 1.0),)},
    ],
)
def test_a_value_out_of_its_range_is_refused_by_name(sampling: dict[str, object]) -> None:
    with pytest.raises(InvalidSampling, match=next(iter(sampling))):
        check(**sampling)


def test_a_shape_that_is_too_long_is_refused() -> None:
    with pytest.raises(InvalidGrammar, match="regex"):
        check(structured=StructuredOutput(GrammarKind.REGEX, "x" * (MAX_SPEC_CHARS + 1)))


def test_the_ends_of_every_range_are_taken() -> None:
    check(
        temperature=0.0,
        top_p=1.0,
        min_p=1.0,
        repetition_penalty=0.01,
        stop_token_ids=(0, 511),
        logit_bias=((511, -100.0), (0, 100.0)),
        structured=StructuredOutput(GrammarKind.REGEX, "x" * MAX_SPEC_CHARS),
    )
