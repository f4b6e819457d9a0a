"""A backend's prefill speed and the time that a request holds a place, learned from past requests."""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import TypeVar

T = TypeVar("T")

# Weight of a new sample after the first ten: a change of regime is followed within about twenty.
SMOOTHING = 0.1
# Bounds of "retry after": below, clients would retry too often; above, too long after the load is gone.
MIN_RETRY_AFTER_S = 0.1
MAX_RETRY_AFTER_S = 30.0
# Prompts of equal length show no slope; from this many uncached tokens on, the whole time to the first token
# is attributed to them, which overestimates. Below, it is attributed to the step.
MIN_PREFILL_SAMPLE = 256
# The rate is learned from the last 20 first tokens, or from the last 200 where those are too noisy: a few
# unexpected cache hits do not make prefill free. Significance tests at about 2 % and 0.1 %: the long one runs
# at every first token, and a slope found by chance would stay.
SHORT_FADE, SHORT_SIGNIFICANT = 0.95, 2.0
LONG_FADE, LONG_SIGNIFICANT = 0.995, 3.0
ENOUGH_SAMPLES = 20  # first tokens after which the absence of a slope is believed
RECENT = 8  # first tokens that bound both times by the slowest of them, so a stall is forgotten after so many
MAX_KINDS = 1_000  # kinds of request with an entry of their own; the least recently used is evicted
# A slope counts when the x differ by this share of their mean; between nearly equal x, differences in y are
# noise.
MIN_SPREAD = 0.1


class Mean:
    """A running mean: plain over the first samples, exponentially weighted after."""

    def __init__(self) -> None:
        self.value = 0.0
        self.samples = 0

    def learn(self, sample: float) -> None:
        """Take one sample; a negative one counts as 0."""
        self.samples += 1
        weight = 1.0 / self.samples if self.samples * SMOOTHING < 1.0 else SMOOTHING
        self.value += weight * ((sample if sample > 0.0 else 0.0) - self.value)


class DecayingLine:
    """Linear regression over decaying sums: how y grows with x, if that is significant.

    ``fade`` is the weight of all older points when one is added. A slope counts when it is ``significant``
    standard errors from 0. If x hardly varies and its mean is above MIN_PREFILL_SAMPLE, a steady y is due to
    x.
    """

    def __init__(self, fade: float, *, significant: float) -> None:
        self._fade = fade
        self._significant = significant
        self.points = self._sx = self._sy = self._sxx = self._sxy = self._syy = 0.0
        self.steepest = 0.0  # the slope of a line through the origin and the mean, with intercept 0

    def learn(self, x: float, y: float) -> None:
        """Add a point; neither coordinate is below 0."""
        fade = self._fade
        self.points = self.points * fade + 1.0
        self._sx = self._sx * fade + x
        self._sy = self._sy * fade + y
        self._sxx = self._sxx * fade + x * x
        self._sxy = self._sxy * fade + x * y
        self._syy = self._syy * fade + y * y
        self.steepest = self._sy / self._sx if self._sx > 0.0 else 0.0

    def slope(self) -> float:
        """Growth of y with x, at most :attr:`steepest`; 0 when it is not significant."""
        n, sx = self.points, self._sx
        if n < 2.0 or sx <= 0.0:
            return 0.0
        xx, yy = n * self._sxx - sx * sx, n * self._syy - self._sy * self._sy
        if xx <= (MIN_SPREAD * sx) ** 2:
            steady = yy <= (self._sy / 2) ** 2
            return self.steepest if steady and sx > MIN_PREFILL_SAMPLE * n else 0.0
        xy = n * self._sxy - sx * self._sy
        # t² = r² (n - 2) / (1 - r²), without the division by 0 of a perfect line.
        if xy <= 0.0 or xy * xy * (n - 2.0 if n > 2.5 else 0.5) < self._significant**2 * (xx * yy - xy * xy):
            return 0.0
        return min(xy / xx, self.steepest)

    def intercept(self, slope: float) -> float:
        """Where a line of that slope through the mean meets x = 0; never below 0."""
        return above / self.points if (above := self._sy - slope * self._sx) > 0.0 else 0.0


class Rates:
    """One backend's learned times; a slope that may be chance counts as 0.

    The time to a first token is ``step_s + s_per_token * tokens_ahead``: a step's own time, decoding of
    others included, and the uncached prompt tokens computed before it, its own among them. ``hold_s`` is how
    long a place is occupied; ``error_s`` and ``ttft_error_s`` are the mean errors of the estimates at
    hand-over and at the offer.
    """

    def __init__(self) -> None:
        self.hold_s = Mean()
        self.ttft_error_s = Mean()
        self.error_s = Mean()
        self._short = DecayingLine(SHORT_FADE, significant=SHORT_SIGNIFICANT)
        self._long = DecayingLine(LONG_FADE, significant=LONG_SIGNIFICANT)
        self._recent_s: deque[float] = deque(maxlen=RECENT)
        self._recent_s_per_token: deque[float] = deque(maxlen=RECENT)
        self.first_tokens = 0
        self.s_per_token = 0.0
        self.step_s = 0.0

    def first_token(self, tokens_ahead: int, took_s: float) -> None:
        """Learn from a first token, ``took_s`` after hand-over, with ``tokens_ahead`` uncached before it."""
        x, y = float(tokens_ahead) if tokens_ahead > 0 else 0.0, took_s if took_s > 0.0 else 0.0
        if self._short.points >= 2.0:
            self.error_s.learn(abs(y - self.step_s - self.s_per_token * tokens_ahead))
        self.first_tokens += 1
        short = self._short
        short.learn(x, y)
        self._long.learn(x, y)
        self._recent_s.append(y)
        self._recent_s_per_token.append(each := y / x if x > 1.0 else y)
        slope = short.slope() or min(self._long.slope(), short.steepest)
        # The slowest of the recent ones is at least as slow as this one.
        self.s_per_token = slope if slope <= each else min(slope, max(self._recent_s_per_token))
        step_s = short.intercept(self.s_per_token)
        self.step_s = step_s if step_s <= y else min(step_s, max(self._recent_s))

    @property
    def prefill_is_free(self) -> bool:
        """Whether enough first tokens show that their time does not depend on the prompts."""
        return self.first_tokens >= ENOUGH_SAMPLES and self.s_per_token <= 0.0


def retry_after_s(wait_s: float, one_turnover_s: float, jitter: float) -> float:
    """Seconds after which a retry makes sense: after the wait, at least after one turnover.

    ``jitter`` (0 to 1) spreads requests refused together over a quarter of that time.
    """
    bounded = min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, wait_s, one_turnover_s))
    return bounded * (1.0 + 0.25 * jitter)


class ByKind(OrderedDict[Hashable, T]):
    """What is learned of each kind of request; beyond MAX_KINDS the least recently learned is evicted."""

    def __init__(self, make: Callable[[], T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, kind: Hashable) -> T:
        made = self[kind] = self._make()
        if len(self) > MAX_KINDS:
            self.popitem(last=False)
        return made


class CachedShares:
    """The share of a prompt that a backend finds in its prefix cache, by kind of request."""

    def __init__(self) -> None:
        self._kinds = ByKind(Mean)

    def learn(self, kind: Hashable, cached: int, prompt: int) -> None:
        if prompt > 0:
            self._kinds[kind].learn(cached / prompt if cached < prompt else 1.0)
            self._kinds.move_to_end(kind)

    def expect(self, kind: Hashable, prompt: int) -> int:
        """Expected cached tokens of such a prompt; 0 before anything is known."""
        mean = self._kinds.get(kind)
        return int(prompt * mean.value) if mean is not None else 0
