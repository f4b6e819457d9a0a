"""Every sampling parameter has a range; a value outside it is refused before the request is queued."""

import math

import pytest

from engine.errors import InvalidGrammar, InvalidSampling, RequestRefused
from engine.limits import MAX_SPEC_CHARS, check_request
from engine.values import GenerationRequest, GrammarKind, SamplingParams, StructuredOutput
from tests.engine.support import make_info


def check(**sampling: object) -> None:
    params = SamplingParams(max_tokens=1, **sampling)  # type: ignore[arg-type]
    check_request(GenerationRequest("a", (1,), params), make_info(vocab_size=512))


@pytest.mark.parametrize(
    "sampling",
    [
        {"min_p": 1.1},
        {"min_p": -0.1},
        {"min_p": math.nan},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e-30},
        {"repetition_penalty": math.inf},
        {"presence_penalty": 2.5},
        {"frequency_penalty": -2.5},
        {"frequency_penalty": math.nan},
        {"logit_bias": ((512, 1.0),)},
        {"logit_bias": ((-1, 1.0),)},
        {"logit_bias": ((5, math.nan),)},
        {"logit_bias": ((5, 101.0),)},
        {"logprobs": -1},
        {"logprobs": 21},
    ],
)
def test_a_value_out_of_its_range_is_refused_by_name(sampling: dict[str, object]) -> None:
    with pytest.raises(InvalidSampling, match=next(iter(sampling))):
        check(**sampling)


@pytest.mark.parametrize("spec", ["x" * (MAX_SPEC_CHARS + 1), "\ud800"])
def test_a_shape_that_is_too_long_or_no_text_is_refused(spec: str) -> None:
    with pytest.raises(InvalidGrammar, match="regex") as refused:
        check(structured=StructuredOutput(GrammarKind.REGEX, spec))
    assert isinstance(refused.value, RequestRefused)


def test_the_ends_of_every_range_are_taken() -> None:
    check(
        min_p=1.0,
        repetition_penalty=0.01,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        logit_bias=((511, -100.0), (0, 100.0)),
        logprobs=20,
        structured=StructuredOutput(GrammarKind.REGEX, "x" * MAX_SPEC_CHARS),
    )
