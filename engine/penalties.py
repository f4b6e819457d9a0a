"""Logit bias and penalties: changes of logits that a request asks for.

Only the tokens that a request names or has used are changed. A sequence has a list of them, each with the
change of its logit; a step gathers these few logits of all rows, changes them and writes them back. No array
has the size of the vocabulary.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.values import SamplingParams

_BIAS, _FACTOR, _SHIFT = range(3)  # rows of ``Adjustments.values``
_FIRST_CAPACITY = 64
# Subtracted from the logits of tokens that may not end the answer yet: far beyond any logit, so that none of
# them is sampled. Finite: where a grammar forbids all other tokens, one of them is.
_BARRED = 1e6


class Adjustments:
    """The changes of logits for one sequence: the token ``ids`` [size], and their ``values`` [3, size].

    First the bias is added, then a positive logit is divided and a negative one multiplied by the factor,
    then the shift is subtracted. The shift of tokens that may not end the answer yet, ``ends`` and stop ids,
    is ``_BARRED``.
    """

    __slots__ = ("_barred", "_counts", "_ids", "_left", "_params", "_places", "_size", "_values")

    def __init__(self, params: SamplingParams, prompt: Iterable[int], ends: Iterable[int] = ()) -> None:
        self._params = params
        self._counts: Counter[int] = Counter()
        self._places: dict[int, int] = {}
        self._size = 0
        self._ids = np.empty(_FIRST_CAPACITY, np.int64)
        self._values = np.empty((3, _FIRST_CAPACITY), np.float32)
        for token, bias in params.logit_bias:
            place = self._place(token)  # before the array is indexed: it may replace the array
            self._values[_BIAS, place] += bias
        if params.repetition_penalty != 1.0:
            for token in set(prompt):
                place = self._place(token)
                self._values[_FACTOR, place] = params.repetition_penalty
        self._left = params.min_tokens
        self._barred = {*ends, *params.stop_token_ids} if params.min_tokens else set()
        for token in self._barred:
            place = self._place(token)
            self._values[_SHIFT, place] = _BARRED

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The tokens whose logits change, without duplicates."""
        return self._ids[: self._size]

    @property
    def values(self) -> npt.NDArray[np.float32]:
        """The bias, factor and shift of each token in ``ids``."""
        return self._values[:, : self._size]

    def add(self, token: int) -> None:
        """Update the changes after ``token`` was added to the output."""
        params, place = self._params, self._place(token)
        self._counts[token] += 1
        self._values[_FACTOR, place] = params.repetition_penalty
        self._values[_SHIFT, place] = params.presence_penalty + params.frequency_penalty * self._counts[token]
        self._left -= 1
        if self._left == 0:
            for barred in self._barred:
                self._values[_SHIFT, self._places[barred]] = 0.0

    def _place(self, token: int) -> int:
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = self._size
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, self._ids])
                self._values = np.concatenate([self._values, self._values], axis=1)
            self._size += 1
            self._ids[place] = token
            self._values[:, place] = (0.0, 1.0, 0.0)
        return place


def adjustments_of(
    params: SamplingParams, prompt: Iterable[int], ends: Iterable[int] = ()
) -> Adjustments | None:
    """The changes for a new sequence; None if its parameters change no logits."""
    neutral = (
        params.repetition_penalty == 1.0
        and params.presence_penalty == 0.0
        and params.frequency_penalty == 0.0
        and not params.logit_bias
        and not params.min_tokens
    )
    return None if neutral else Adjustments(params, prompt, ends)


def adjust(logits: torch.Tensor, rows: Sequence[int], states: Sequence[Adjustments]) -> None:
    """Change ``logits`` [rows, vocabulary] in place: row ``rows[i]`` by ``states[i]``."""
    device = logits.device
    ids = [state.ids for state in states]
    places = torch.from_numpy(np.repeat(rows, [len(one) for one in ids])).to(device)
    tokens = torch.from_numpy(np.concatenate(ids)).to(device)
    values = torch.from_numpy(np.concatenate([state.values for state in states], axis=1)).to(device)
    bias, factor, shift = values.unbind()
    changed = logits[places, tokens] + bias
    changed = torch.where(changed > 0, changed / factor, changed * factor) - shift
    logits[places, tokens] = changed
