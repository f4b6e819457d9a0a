"""Converts a trace to the requests to send: times divided, lengths scaled and clamped to the model."""

from collections.abc import Iterator
from dataclasses import dataclass

from ops.replay.options import ReplayError
from ops.replay.trace import Trace

# Tokens between a clamped request and the limit: the calibration may be off by a few tokens, and a request
# that is one token too long fails.
CLAMP_MARGIN = 32


@dataclass(frozen=True, slots=True)
class Planned:
    """One request to send.

    Args:
        due_s: when to send it, in seconds after the start.
        prompt_tokens: length of the whole prompt, markup included.
        block_ids: ids of the prompt's blocks, ``block_tokens`` each; empty for one without shared parts.
        clamped: whether a length was cut to fit the model.
    """

    index: int
    due_s: float
    prompt_tokens: int
    max_tokens: int
    block_ids: tuple[int, ...] = ()
    block_tokens: int = 0
    clamped: bool = False


def plan(trace: Trace, *, speed: float, scale_tokens: float, max_model_len: int) -> Iterator[Planned]:
    """The requests of ``trace``, in order.

    Args:
        speed: divisor of the times.
        scale_tokens: factor for the lengths, which are at least 1.
        max_model_len: limit of prompt and answer together. First the answer is cut to what the prompt leaves,
            but not below half of the limit; then the prompt to what the answer leaves.

    Raises ReplayError: ``max_model_len`` leaves no room for a prompt.
    """
    if max_model_len < 2 * CLAMP_MARGIN:
        raise ReplayError(
            f"--max-model-len: {max_model_len} is too short; allowed: {2 * CLAMP_MARGIN} and more"
        )
    block_tokens = _scaled(trace.block_tokens, scale_tokens)
    for index, arrival in enumerate(trace.arrivals):
        asked_in = _scaled(arrival.input_tokens, scale_tokens)
        asked_out = _scaled(arrival.output_tokens, scale_tokens)
        if asked_in + asked_out + CLAMP_MARGIN <= max_model_len:
            prompt_tokens, max_tokens = asked_in, asked_out
        else:
            max_tokens = min(asked_out, max(max_model_len // 2, max_model_len - asked_in - CLAMP_MARGIN))
            prompt_tokens = min(asked_in, max_model_len - max_tokens - CLAMP_MARGIN)
        yield Planned(
            index=index,
            due_s=arrival.at_s / speed,
            prompt_tokens=max(1, prompt_tokens),
            max_tokens=max_tokens,
            block_ids=arrival.block_ids,
            block_tokens=block_tokens,
            clamped=(prompt_tokens, max_tokens) != (asked_in, asked_out),
        )


def _scaled(tokens: int, factor: float) -> int:
    return max(1, round(tokens * factor))
