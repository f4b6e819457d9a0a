"""Takes vLLM's outputs of one request, and reads an answer from them."""

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from gateway.backends.port import Completion
from gateway.backends.vllm.answer_parser import AnswerParser
from gateway.contracts.events import Delta, counted
from gateway.contracts.values import FinishReason, Sampling, TokenLogprob, Usage
from resilience.failures import BackendFailure, FailureKind


class Outputs:
    """vLLM's outputs of one request, out of its ``RequestOutputCollector``, or its texts and their tokens.

    vLLM stores an output there for the task that awaits it, and merges later outputs into it. While
    :meth:`pass_on` runs, the call that would store an output passes it on instead, which wakes no task.

    Args:
        up_to_date: whether no outputs of further steps wait to be read. Else outputs are merged, as in vLLM:
            a process that cannot keep up with its engine sends fewer, longer pieces.

    ``collector``: vLLM's; ``taker``: that of :meth:`pass_on` while it waits for an output;
    ``state``: vLLM's state of the request if its texts may be given here; ``held``: a text that waits for the
    next one.
    """

    state: Any = None
    held: tuple[str, tuple[int, ...]] | None = None

    def __init__(self, collector: Any, up_to_date: Callable[[], bool]) -> None:
        self.request_id: str = collector.request_id
        self.collector = collector
        self._store = collector.put
        self._up_to_date = up_to_date
        self.taker: Callable[[Any], bool] | None = None
        collector.put = self._put

    async def pass_on(self, take: Callable[[Any], bool]) -> None:
        """Give ``take`` each output until it returns False; ``take`` must not wait or raise.

        Raises vLLM's errors.
        """
        collector = self.collector
        while True:
            stored = collector.get_nowait()
            if stored is not None and not take(stored):
                return
            self.taker = take
            try:
                await collector.ready.wait()
                stopped = self.taker is None
            finally:
                self.taker = None
            if stopped:
                if collector.output is None:
                    collector.ready.clear()
                return

    def stop(self) -> None:
        """End :meth:`pass_on`: ``taker`` has returned False."""
        self.taker = None
        self.collector.ready.set()

    def detach(self) -> None:
        """Take no more outputs. Breaks the reference cycle with the collector, so no collection is needed."""
        del self.collector.put

    def _put(self, output: Any) -> None:
        take = self.taker
        if (
            take is None
            or self.collector.output is not None
            or isinstance(output, Exception)
            or not self._up_to_date()
        ):
            self._store(output)
        elif not take(output):
            self.stop()


class OutputReader(Struct, eq=False):
    """Reads an answer; implements :class:`gateway.backends.delta_forwarder.AnswerReader`.

    Args:
        prompt_tokens: tokens of the prompt, without those of a partial answer.
        parser: that of the answer; ``None``: the answer is text alone.
    """

    _sampling: Sampling
    _prompt_tokens: int
    _parser: AnswerParser | None
    _token_bytes: Callable[[int], bytes]
    _reasons: dict[int, FinishReason] = {}
    _stop: str | None = None
    _tokens: int = 0
    _cached: int = 0
    _wait_s: float = 0.0
    started: bool = False
    done: bool = False
    fault: BackendFailure | None = None

    def feed(self, output: Any) -> Sequence[Delta]:
        """The deltas of a ``RequestOutput``, or of a text and its tokens after the first output."""
        if output.__class__ is tuple:
            text, ids = output
            self._tokens += len(ids)
            delta = Delta(text, len(ids), None, None, 0, (), ids)
            return (delta,) if self._parser is None else counted(self._parser.take(0, text, ids), delta)
        deltas: list[Delta] = []
        self.done = output.finished
        if output.metrics is not None and output.metrics.is_corrupted:
            self.fault = BackendFailure(FailureKind.NAN_OUTPUT, "vLLM computed logits that are not numbers")
            return deltas
        for one in output.outputs:
            reason = None
            if one.finish_reason is not None:
                self.fault = _fault(one.finish_reason)
                if self.fault is not None:
                    break
                reason = FinishReason.LENGTH if one.finish_reason == "length" else FinishReason.STOP
                self._reasons[one.index] = reason
                if one.index == 0 and isinstance(one.stop_reason, str):
                    self._stop = one.stop_reason
            ids = tuple(one.token_ids)
            ended = self._parser is not None and reason is not None
            if not ids and not one.text and not ended:
                continue
            self._tokens += len(ids)
            logprobs = self._logprobs(one) if one.logprobs else ()
            figures: tuple[int | None, float | None] = (None, None)
            if not self.started:  # the first choice computes the prompt; others find it cached
                self.started = True
                self._cached = min(output.num_cached_tokens or 0, self._prompt_tokens)
                self._wait_s = _queue_wait_s(output.metrics)
                figures = self._cached, self._wait_s
            delta = Delta(one.text, len(ids), *figures, one.index, logprobs, ids)
            if self._parser is None:
                deltas.append(delta)
                continue
            whole = reason is FinishReason.STOP
            stopped = whole and isinstance(one.stop_reason, str)
            events = self._parser.take(one.index, one.text, ids, finished=ended, whole=whole, stopped=stopped)
            deltas += counted(events, delta)
            if reason is not None:
                self._reasons[one.index] = self._parser.reason(one.index, reason)
        return deltas

    def completion(self) -> Completion:
        usage = Usage(self._prompt_tokens, self._tokens, self._cached)
        choices = range(self._sampling.n)
        reason, *others = [self._reasons.get(index, FinishReason.CANCELLED) for index in choices]
        warnings = () if self._parser is None else self._parser.warnings
        return Completion(reason, usage, self._wait_s, tuple(others), warnings, stop_sequence=self._stop)

    def _logprobs(self, one: Any) -> tuple[TokenLogprob, ...]:
        """One entry per token; vLLM gives the drawn token and the likeliest in one mapping, with ranks."""
        logprobs = []
        most = self._sampling.logprobs or 0
        for token, entries in zip(one.token_ids, one.logprobs, strict=False):
            likely = [entry for entry in entries.items() if entry[1].rank <= most]
            likely.sort(key=lambda entry: entry[1].rank)
            top = tuple(
                [TokenLogprob(self._token_bytes(each), value.logprob) for each, value in likely[:most]]
            )
            logprobs.append(TokenLogprob(self._token_bytes(token), entries[token].logprob, top))
        return tuple(logprobs)


def _fault(reason: str) -> BackendFailure | None:
    """The failure for a finish reason of vLLM; ``None``: it is no failure."""
    if reason == "error":
        return BackendFailure(FailureKind.INTERNAL, "vLLM reported an error of this request")
    if reason == "abort":  # the gateway does not read requests that it aborted itself
        return BackendFailure(FailureKind.ENGINE_DEAD, "vLLM is stopping and has given the request up")
    return None


def _queue_wait_s(stats: Any) -> float:
    if stats is None or not stats.scheduled_ts:
        return 0.0
    return max(0.0, float(stats.scheduled_ts - stats.queued_ts))
