"""The outcome of one request of a replay, and the distribution of a figure over many requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from gateway.shadow.statistics import quantile


@dataclass(slots=True)
class ReplayedRequest:
    """One request as observed by the client. ``due_s`` and ``sent_s`` count from the replay's start.

    Args:
        ttft_s: seconds from sending to the first text; ``None`` without text.
        last_token_s: seconds from sending to the last text.
        total_s: seconds from sending to the end.
        code: error code if there is no whole answer, otherwise ``None``.
        input_tokens: as reported by the gateway; 0 if it did not report them.
        fallback: ``kind:reason`` when the answer came from the fallback chain.
        texts: pieces of text received so far; ``ended``: the stream's end was received.
    """

    index: int
    due_s: float
    sent_s: float
    asked_input: int
    asked_output: int
    total_s: float = 0.0
    ttft_s: float | None = None
    last_token_s: float | None = None
    code: str | None = None
    finish_reason: str | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    fallback: str | None = None
    backend: str | None = None
    texts: int = 0
    ended: bool = False

    @property
    def ok(self) -> bool:
        """Whether a whole answer was received."""
        return self.code is None

    @property
    def client_delay_s(self) -> float:
        """Seconds by which it was sent late: because of the concurrency limit, or a busy load generator."""
        return max(0.0, self.sent_s - self.due_s)

    @property
    def done_s(self) -> float:
        """The time of its end, in seconds after the replay's start."""
        return self.sent_s + self.total_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds between two tokens; ``None`` with fewer than two."""
        if self.ttft_s is None or self.last_token_s is None or self.output_tokens < 2:
            return None
        return (self.last_token_s - self.ttft_s) / (self.output_tokens - 1)

    def within(self, *, ttft_s: float, total_s: float) -> bool:
        """Whether it counts as goodput: a whole answer, not a degraded one, within both limits."""
        return (
            self.ok
            and self.finish_reason != "degraded"
            and self.ttft_s is not None
            and self.ttft_s <= ttft_s
            and self.total_s <= total_s
        )


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of a figure; all ``None`` without values."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None


def spread(values: Sequence[float]) -> Spread:
    if not values:
        return Spread(0)
    ordered = sorted(values)
    p50, p90, p99 = (quantile(ordered, share) for share in (0.5, 0.9, 0.99))
    return Spread(len(ordered), fmean(ordered), p50, p90, p99, ordered[-1])
