"""Bias and penalties against a plain reference over the whole vocabulary."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.penalties import adjust, adjustments_of
from engine.values import SamplingParams

VOCABULARY = 24
token = st.integers(0, VOCABULARY - 1)
tokens = st.lists(token, max_size=100)
params = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.3, 2.0]),
    presence_penalty=st.sampled_from([-1.0, 0.0, 0.7, 2.0]),
    frequency_penalty=st.sampled_from([-0.7, 0.0, 0.4, 2.0]),
    logit_bias=st.lists(st.tuples(token, st.floats(-100, 100, width=32)), max_size=5).map(tuple),
)


def reference(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]
) -> list[float]:
    """Returns the logits after bias and penalties by vLLM's definitions, one token at a time."""
    result = list(logits)
    for one, bias in params.logit_bias:
        result[one] += bias
    for one in range(len(result)):
        if one in prompt or one in output:
            factor = params.repetition_penalty
            result[one] = result[one] / factor if result[one] > 0 else result[one] * factor
        result[one] -= params.frequency_penalty * output.count(one)
        result[one] -= params.presence_penalty * (one in output)
    return result


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(params, tokens, tokens), min_size=1, max_size=4), st.integers(0, 1000))
def test_every_row_is_changed_as_the_reference_says_and_no_other(
    rows: list[tuple[SamplingParams, list[int], list[int]]], seed: int
) -> None:
    logits = torch.randn(len(rows) + 1, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4
    expected = [reference(one.tolist(), *row) for one, row in zip(logits, rows, strict=False)] + [
        logits[-1].tolist()
    ]
    states = {}
    for at, (asked, prompt, output) in enumerate(rows):
        state = adjustments_of(asked, prompt)
        if state is not None:
            states[at] = state
            for one in output:
                state.add(one)
    if states:
        adjust(logits, list(states), list(states.values()))
    assert torch.allclose(logits, torch.tensor(expected), atol=1e-3, rtol=1e-5)


def test_a_request_that_changes_no_logits_has_no_state() -> None:
    assert adjustments_of(SamplingParams(1, temperature=0.3, top_k=4, min_p=0.1), (1, 2)) is None


def test_presence_counts_once_even_when_frequency_cancels_it() -> None:
    asked = SamplingParams(1, presence_penalty=1.0, frequency_penalty=-1.0)
    state = adjustments_of(asked, ())
    assert state is not None
    logits = torch.zeros(1, 4)
    for expected in (0.0, 1.0, 2.0):
        state.add(2)
        adjusted = logits.clone()
        adjust(adjusted, [0], [state])
        assert adjusted[0, 2] == pytest.approx(expected)
        assert adjusted[0, [0, 1, 3]].tolist() == [0.0, 0.0, 0.0]


def test_an_output_of_more_tokens_than_the_first_capacity_is_penalized_in_full() -> None:
    asked = SamplingParams(1, frequency_penalty=0.5)
    state = adjustments_of(asked, ())
    assert state is not None
    for one in [*range(300), *range(300)]:
        state.add(one)
    logits = torch.zeros(2, 400)
    adjust(logits, [1], [state])
    assert logits[1].tolist() == [-1.0] * 300 + [0.0] * 100
    assert not logits[0].any()


def test_long_prompts_and_many_biases_are_kept_too() -> None:
    bias = tuple((one, 3.0) for one in range(100))
    state = adjustments_of(SamplingParams(1, repetition_penalty=2.0, logit_bias=bias), range(50, 300))
    assert state is not None
    logits = torch.ones(1, 400)
    adjust(logits, [0], [state])
    assert logits[0].tolist() == [4.0] * 50 + [2.0] * 50 + [0.5] * 200 + [1.0] * 100
