"""How fast a backend prefills and how long it keeps a place, learned from what it has done."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from admission.slope import FadingLine

# Weight of a new sample once some ten have been seen: a change of regime is followed within about twenty.
SMOOTHING = 0.1
# Bounds of "try again": below, clients would hammer; above, they would stay away long after the load is gone.
MIN_RETRY_AFTER_S = 0.1
MAX_RETRY_AFTER_S = 30.0
# When all prompts were alike there is no slope to see; from this many uncached tokens on the whole time to
# the first token is put down to them, which errs on the side of slow. Below, the step's own time rules.
MIN_PREFILL_SAMPLE = 256
# What the rate is learned from: the last twenty first tokens. Where those are too noisy to tell one, the last
# two hundred: a few prompts that the cache held by surprise do not make prefill free. Tests at about 2 % and
# 0.1 %: the long one is asked at every first token, and a slope found by chance would stay.
SHORT_FADE, SHORT_SIGNIFICANT = 0.95, 2.0
LONG_FADE, LONG_SIGNIFICANT = 0.995, 3.0
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
    them. Both are learned by following the line's two coordinates. Neither is ever below 0, and a slope that
    may be chance is taken for none.

    Attributes:
        hold_s: how long a place is held.
        error_s: how far a first token comes from where it was expected at hand-over.
        ttft_error_s: the same from where its offer foresaw it.
        s_per_token: seconds of prefill per uncached token; 0 while unknown.
        step_s: seconds to a first token with nothing to compute before it; 0 while unknown.
    """

    __slots__ = (
        "_long", "_seen", "_short", "error_s", "hold_s", "s_per_token", "step_s", "ttft_error_s"
    )  # fmt: skip

    def __init__(self) -> None:
        self.hold_s = Mean()
        self.ttft_error_s = Mean()
        self.error_s = Mean()
        alike_from = MIN_PREFILL_SAMPLE
        self._short = FadingLine(SHORT_FADE, significant=SHORT_SIGNIFICANT, alike_from=alike_from)
        self._long = FadingLine(LONG_FADE, significant=LONG_SIGNIFICANT, alike_from=alike_from)
        self._seen = 0
        self.s_per_token = 0.0
        self.step_s = 0.0

    def first_token(self, tokens_ahead: int, took_s: float) -> None:
        """A first token came ``took_s`` after hand-over; so many uncached tokens were computed before it."""
        x, y = float(max(0, tokens_ahead)), max(0.0, took_s)
        if self._short.points >= 2.0:
            self.error_s.learn(abs(y - self.first_token_s(tokens_ahead)))
        self._seen += 1
        short = self._short
        short.learn(x, y)
        self._long.learn(x, y)
        self.s_per_token = short.slope() or min(self._long.slope(), short.steepest)
        self.step_s = short.intercept(self.s_per_token)

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
