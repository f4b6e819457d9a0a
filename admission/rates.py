"""How fast a backend prefills and how long it keeps a place, learned from what it has done."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

# Weight of a new sample once some ten have been seen: a change of regime is followed within about twenty.
SMOOTHING = 0.1
# Bounds of "try again": below, clients would hammer; above, they would stay away long after the load is gone.
MIN_RETRY_AFTER_S = 0.1
MAX_RETRY_AFTER_S = 30.0
# When all prompts were alike there is no slope to see; from this many uncached tokens on the whole time to
# the first token is put down to them, which errs on the side of slow. Below, the step's own time rules.
MIN_PREFILL_SAMPLE = 256
# A slope counts when it is this many standard errors from 0 (a one-sided test at about 2 %) and lengths
# differ by this share of their mean: where all prompts are cached but for a few tokens, times are noise.
SIGNIFICANT = 2.0
MIN_SPREAD = 0.1
# First tokens after which the absence of a slope is taken for what it is.
ENOUGH_SAMPLES = 20
# Kinds of request that are told apart; the one seen longest ago is forgotten.
MAX_KINDS = 1_000


class Mean:
    """A mean that follows: plain over the first samples, exponentially weighted after."""

    __slots__ = ("samples", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.samples = 0

    def learn(self, sample: float) -> None:
        """Take one sample; a negative one counts as 0."""
        self.samples += 1
        weight = max(1.0 / self.samples, SMOOTHING)
        self.value += weight * (max(0.0, sample) - self.value)


class Rates:
    """What one backend has been seen to do.

    The time to a first token is modelled as ``step_s + tokens_ahead / prefill_rate``: a step's own time,
    decode interference included, and the uncached prompt tokens that are computed before it, its own among
    them. Both are learned by following the line's two coordinates (a least-squares slope with fading sums).
    Neither is ever below 0, and a slope that may be chance is taken for none.

    Attributes:
        hold_s: how long a place is held.
        tpot_s: time per output token, of routes with a target for it.
        error_s: how far a first token comes from where it was expected at hand-over.
        ttft_error_s: the same from where its offer foresaw it.
        s_per_token: seconds of prefill per uncached token; 0 while unknown.
        step_s: seconds to a first token with nothing to compute before it; 0 while unknown.
    """

    __slots__ = (
        "_n", "_seen", "_sx", "_sxx", "_sxy", "_sy", "_syy", "error_s", "hold_s", "s_per_token", "step_s",
        "tpot_s", "ttft_error_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.hold_s = Mean()
        self.tpot_s = Mean()
        self.ttft_error_s = Mean()
        self.error_s = Mean()
        self._n = self._sx = self._sy = self._sxx = self._sxy = self._syy = 0.0
        self._seen = 0
        self.s_per_token = 0.0
        self.step_s = 0.0

    def first_token(self, tokens_ahead: int, took_s: float) -> None:
        """A first token came ``took_s`` after hand-over; so many uncached tokens were computed before it."""
        fade = 1.0 - SMOOTHING / 2
        x, y = float(max(0, tokens_ahead)), max(0.0, took_s)
        if self._n >= 2.0:
            self.error_s.learn(abs(y - self.first_token_s(tokens_ahead)))
        self._seen += 1
        self._n = self._n * fade + 1.0
        self._sx = self._sx * fade + x
        self._sy = self._sy * fade + y
        self._sxx = self._sxx * fade + x * x
        self._sxy = self._sxy * fade + x * y
        self._syy = self._syy * fade + y * y
        self.s_per_token = self._learned_slope()
        self.step_s = max(0.0, (self._sy - self.s_per_token * self._sx) / self._n)

    def _learned_slope(self) -> float:
        n, sx = self._n, self._sx
        if n < 2.0 or sx <= 0.0:
            return 0.0
        most = self._sy / sx  # then nothing is left for the step
        xx, yy = n * self._sxx - sx * sx, n * self._syy - self._sy * self._sy
        if xx <= (MIN_SPREAD * sx) ** 2:
            steady = yy <= (self._sy / 2) ** 2
            return most if steady and sx > MIN_PREFILL_SAMPLE * n else 0.0
        xy = n * self._sxy - sx * self._sy
        # t² = r² (n - 2) / (1 - r²), without a division by what a perfect line makes 0.
        if xy <= 0.0 or xy * xy * max(0.5, n - 2.0) < SIGNIFICANT**2 * (xx * yy - xy * xy):
            return 0.0
        return min(xy / xx, most)

    @property
    def prefill_is_free(self) -> bool:
        """Whether enough first tokens were seen to say that their time does not depend on the prompts."""
        return self._seen >= ENOUGH_SAMPLES and self.s_per_token <= 0.0

    def first_token_s(self, tokens_ahead: int) -> float:
        """Expected seconds from hand-over to the first token; 0 while unknown."""
        return self.step_s + self.s_per_token * tokens_ahead


def retry_after_s(wait_s: float, one_turnover_s: float, jitter: float) -> float:
    """When trying again makes sense: after the wait, at least after one turnover; bounded, seconds.

    ``jitter`` (0 to 1) spreads those who were refused together over a quarter of that time.
    """
    bounded = min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, wait_s, one_turnover_s))
    return bounded * (1.0 + 0.25 * jitter)


class CachedShares:
    """How much of a prompt a backend finds in its prefix cache, by kind of request."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[Hashable, Mean] = OrderedDict()

    def learn(self, kind: Hashable, cached: int, prompt: int) -> None:
        """A prompt of that kind was found in part."""
        if prompt <= 0:
            return
        mean = self._kinds.get(kind)
        if mean is None:
            mean = self._kinds[kind] = Mean()
            if len(self._kinds) > MAX_KINDS:
                self._kinds.popitem(last=False)
        else:
            self._kinds.move_to_end(kind)
        mean.learn(min(1.0, cached / prompt))

    def expect(self, kind: Hashable, prompt: int) -> int:
        """Tokens of such a prompt that will likely be found; none while nothing is known."""
        mean = self._kinds.get(kind)
        return int(prompt * mean.value) if mean is not None else 0
