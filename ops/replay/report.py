"""The figures of a replay, for the terminal, a file and a plot.

The JSON form is :func:`figures_of`; its ``schema`` number changes when a field is renamed or changes its
meaning.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from ops.replay.load import ReplayRun
from ops.replay.options import ReplaySlo
from ops.replay.outcome import ReplayedRequest, Spread, spread

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token sums over whole answers; ``asked_*`` are the trace's lengths, scaled and clamped."""

    asked_input: int
    input: int
    asked_output: int
    output: int
    cached: int

    @property
    def cached_share(self) -> float | None:
        """Share of the prompt tokens that came from a prefix cache; ``None`` without prompt tokens."""
        return self.cached / self.input if self.input else None


@dataclass(frozen=True)
class ReplayReport:
    """The figures of a replay that has ended; ``clamped``: number of requests cut to the model's length."""

    run: ReplayRun
    slo: ReplaySlo
    clamped: int = 0

    @cached_property
    def whole(self) -> Sequence[ReplayedRequest]:
        return [outcome for outcome in self.run.outcomes if outcome.ok]

    @cached_property
    def latency_ms(self) -> Mapping[str, Spread]:
        """Milliseconds from sending, over whole answers.

        ``client_delay``, over all requests that ended, is by how much they were sent later than due; no
        other latency includes it.
        """
        whole = self.whole
        return {
            "ttft": spread([o.ttft_s * 1000 for o in whole if o.ttft_s is not None]),
            "tpot": spread([tpot * 1000 for o in whole if (tpot := o.tpot_s) is not None]),
            "total": spread([o.total_s * 1000 for o in whole]),
            "client_delay": spread([o.client_delay_s * 1000 for o in self.run.outcomes]),
        }

    @cached_property
    def tokens(self) -> Tokens:
        whole = self.whole
        return Tokens(
            asked_input=sum(o.asked_input for o in whole),
            input=sum(o.input_tokens for o in whole),
            asked_output=sum(o.asked_output for o in whole),
            output=sum(o.output_tokens for o in whole),
            cached=sum(o.cached_tokens for o in whole),
        )

    @cached_property
    def counts(self) -> Mapping[str, Mapping[str, int]]:
        """Numbers of requests by error code, fallback, finish reason and backend."""
        ended, whole = self.run.outcomes, self.whole
        return {
            "errors": _counted(o.code for o in ended),
            "fallbacks": _counted(o.fallback for o in ended),
            "finish_reasons": _counted(o.finish_reason for o in whole),
            "backends": _counted(o.backend for o in whole),
        }

    @cached_property
    def within_slo(self) -> int:
        ttft_s, total_s = self.slo.ttft_ms / 1000, self.slo.total_ms / 1000
        return sum(o.within(ttft_s=ttft_s, total_s=total_s) for o in self.whole)

    @property
    def error_count(self) -> int:
        """Number of requests that ended without a whole answer."""
        return len(self.run.outcomes) - len(self.whole)

    def per_second(self, count: float) -> float | None:
        """``count`` divided by the replay's duration; ``None`` if that is 0."""
        return count / self.run.wall_s if self.run.wall_s > 0 else None


def _counted(names: Iterable[str | None]) -> dict[str, int]:
    return dict(Counter(name for name in names if name is not None).most_common())


def figures_of(result: ReplayReport, setup: Mapping[str, object]) -> dict[str, object]:
    """The report as JSON values; ``setup`` describes the replay (trace, options, calibration)."""
    run, tokens = result.run, result.tokens
    return {
        "schema": SCHEMA,
        **setup,
        "requests": {
            "sent": run.sent,
            "completed": len(result.whole),
            "errors": result.error_count,
            "unfinished": run.unfinished,
            "clamped": result.clamped,
            "interrupted": run.interrupted,
        },
        "wall_s": run.wall_s,
        "latency_ms": {name: asdict(values) for name, values in result.latency_ms.items()},
        "throughput_per_s": {
            "requests": result.per_second(len(result.whole)),
            "input_tokens": result.per_second(tokens.input),
            "output_tokens": result.per_second(tokens.output),
        },
        "tokens": {**asdict(tokens), "cached_share": tokens.cached_share},
        "goodput": {
            **asdict(result.slo),
            "within_slo": result.within_slo,
            "share": result.within_slo / run.sent if run.sent else None,
            "requests_per_s": result.per_second(result.within_slo),
        },
        **result.counts,
    }
