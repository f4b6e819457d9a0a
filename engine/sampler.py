"""From logits to tokens: greedy, temperature, top-k, top-p; all rows at once.

A request's randomness is a function of its seed and of the position of the token, not of a generator that
others draw from. So the same seed gives the same tokens alone, in any batch, and after a preemption. The
number picks a token from the cumulated probabilities in vocabulary order: unlike an order by probability, it
does not change when two nearly equal tokens swap places because another batch size rounds differently.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.values import SamplingParams

# Below this temperature the distribution is a single token in float32, and dividing by it would overflow.
GREEDY_BELOW = 1e-5
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row is sampled with: its parameters, its seed, and how many tokens its request has so far."""

    params: SamplingParams
    seed: int
    position: int


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on the arguments only: SplitMix64, stream ``seed``, at ``position``."""
    state = _mix(seed & _MASK64) + (position + 1) * 0x9E3779B97F4A7C15
    return (_mix(state & _MASK64) >> 11) / (1 << 53)


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """One token for each row of ``logits`` [rows, vocabulary], float32 and finite."""
    tokens = logits.argmax(dim=-1).tolist()
    rows = [row for row, draw in enumerate(draws) if draw.params.temperature >= GREEDY_BELOW]
    if rows:
        chosen = [draws[row] for row in rows]
        selected = logits if len(rows) == len(draws) else logits[rows]
        for row, token in zip(rows, _draw(selected, chosen), strict=True):
            tokens[row] = token
    result: list[int] = tokens
    return result


def _draw(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    params = [draw.params for draw in draws]
    device = logits.device
    temperature = torch.tensor([one.temperature for one in params], device=device)
    probabilities = torch.softmax(logits / temperature.unsqueeze(1), dim=-1)
    if any(one.top_k or one.top_p < 1.0 for one in params):
        probabilities = keep_likely(
            probabilities, [one.top_k for one in params], [one.top_p for one in params]
        )
    cumulated = probabilities.cumsum(dim=-1, dtype=torch.float64)
    numbers = [uniform(draw.seed, draw.position) for draw in draws]
    target = torch.tensor(numbers, dtype=torch.float64, device=device).unsqueeze(1) * cumulated[:, -1:]
    # The first token whose cumulated probability exceeds the target; so never one of probability zero.
    found: list[int] = torch.searchsorted(cumulated, target, right=True).squeeze(1).tolist()
    return found


def keep_likely(probabilities: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> torch.Tensor:
    """Zeroes what top-k and then top-p leave out; the rest is not scaled. Equals of the last kept one are
    kept.

    Top-p keeps the fewest most likely of the top-k tokens whose probabilities, relative to all of the top-k,
    reach p.
    """
    vocabulary = probabilities.shape[-1]
    limits = [min(k, vocabulary) if k else vocabulary for k in top_k]
    ordered = probabilities.topk(max(limits), dim=-1).values
    limit = torch.tensor(limits, device=probabilities.device).unsqueeze(1)
    share = torch.tensor(top_p, dtype=torch.float64, device=probabilities.device).unsqueeze(1)
    ordered = ordered.masked_fill(torch.arange(ordered.shape[-1], device=limit.device) >= limit, 0.0)
    cumulated = ordered.cumsum(dim=-1, dtype=torch.float64)
    kept = (cumulated - ordered < share * cumulated[:, -1:]) | (share >= 1.0)
    kept &= ordered > 0
    least = ordered.gather(-1, kept.sum(dim=-1, keepdim=True).clamp_(min=1) - 1)
    return probabilities.masked_fill(probabilities < least, 0.0)
