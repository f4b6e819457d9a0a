"""Bedrock's events and answers, read; and a stream of them as the port's pieces and completion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from gateway.backends.bedrock.stops import BlankStops
from gateway.backends.bedrock.values import ConverseStop, ConverseUsage, Event, TextPiece
from gateway.backends.port import Completion, Delta
from gateway.contracts.values import FinishReason, Usage

# The tokens of hardly any text have so many bytes on average: a count by it is not too high. It stands in for
# Bedrock's own count, which comes at the very end, while an answer may still be cut short.
BYTES_A_TOKEN = 8

# A guardrail's text is the answer that the operator wants in that place; what a filter has cut is a torn one.
_FINISH: Mapping[str, FinishReason] = MappingProxyType(
    {
        "end_turn": FinishReason.STOP,
        "stop_sequence": FinishReason.STOP,
        "tool_use": FinishReason.STOP,
        "guardrail_intervened": FinishReason.STOP,
        "max_tokens": FinishReason.LENGTH,
        "model_context_window_exceeded": FinishReason.LENGTH,
        "content_filtered": FinishReason.ERROR,
        "malformed_model_output": FinishReason.ERROR,
        "malformed_tool_use": FinishReason.ERROR,
    }
)


def events_of_stream(stream: Iterable[Mapping[str, Any]]) -> Iterator[Event]:
    """What ``converse_stream`` tells, event by event; thinking and citations are not asked for, nor read."""
    for event in stream:
        if "contentBlockDelta" in event:
            text = event["contentBlockDelta"]["delta"].get("text")
            if text:
                yield TextPiece(text)
        elif "messageStop" in event:
            yield ConverseStop(event["messageStop"]["stopReason"])
        elif "metadata" in event:
            yield _told(event["metadata"])


def events_of_answer(answer: Mapping[str, Any]) -> Iterator[Event]:
    """What ``converse`` answered, as the same events."""
    for block in answer["output"]["message"]["content"]:
        if block.get("text"):
            yield TextPiece(block["text"])
    yield ConverseStop(answer["stopReason"])
    yield _told(answer)


def _told(metadata: Mapping[str, Any]) -> ConverseUsage:
    usage = metadata["usage"]
    return ConverseUsage(
        fresh_tokens=usage["inputTokens"],
        cache_read_tokens=usage.get("cacheReadInputTokens") or 0,
        cache_write_tokens=usage.get("cacheWriteInputTokens") or 0,
        output_tokens=usage["outputTokens"],
        latency_ms=metadata.get("metrics", {}).get("latencyMs", 0),
    )


class ConverseReader:
    """Counts an answer's pieces while they come, and closes the count with what Bedrock reported.

    Args:
        queue_wait_s: how long the request waited for a thread.
        estimated_input: the prompt's tokens, should Bedrock never tell.
        share: of the input that Bedrock counts, the request's own prompt; the rest is a partial answer.
        stops: the request's stop strings.
    """

    def __init__(
        self, queue_wait_s: float, estimated_input: int, share: float = 1.0, stops: Sequence[str] = ()
    ) -> None:
        self._blank = BlankStops(stops)
        self._queue_wait_s = queue_wait_s
        self._estimated_input = estimated_input
        self._share = share
        self._bytes = 0
        self._pieces = 0
        self._counted = 0
        self._reason: str | None = None
        self.usage: ConverseUsage | None = None

    @property
    def stopped(self) -> bool:
        """Whether the model has come to its end."""
        return self._reason is not None

    @property
    def cut(self) -> bool:
        """Whether the answer has ended before the model: at a stop string that Bedrock was not told."""
        return self._blank.reached

    @property
    def complete(self) -> bool:
        """Whether there is nothing left to be told."""
        return self.cut or (self.stopped and self.usage is not None)

    def feed(self, events: Iterable[Event]) -> Delta | None:
        """Take events in; their text as one piece, if they hold any."""
        texts = []
        for event in events:
            match event:
                case TextPiece(text):
                    texts.append(text)
                case ConverseStop(reason):
                    self._reason = reason
                case ConverseUsage():
                    self.usage = event
        if not texts:
            return None
        first, text = not self._pieces, "".join(texts)
        self._pieces += len(texts)
        self._bytes += len(text.encode("utf-8", "replace"))
        text = self._blank.push(text)
        before, self._counted = self._counted, max(self._pieces, self._bytes // BYTES_A_TOKEN)
        return Delta(text, self._counted - before, queue_wait_s=self._queue_wait_s if first else None)

    def finish(self) -> tuple[Delta | None, Completion]:
        """The tokens that were not counted with their pieces, and how the answer ended."""
        counted, reason = self.usage, _FINISH.get(self._reason or "", FinishReason.STOP)
        if self.cut:
            reason = FinishReason.STOP
        text = self._blank.flush()
        if counted is None:
            usage = Usage(self._estimated_input, self._counted)
            return (Delta(text, 0) if text else None), Completion(reason, usage, self._queue_wait_s)
        # Should the count be above what Bedrock reported, what has been passed on cannot be taken back.
        missing = max(0, counted.output_tokens - self._counted)
        input_tokens = round(counted.input_tokens * self._share)
        cached_tokens = min(counted.cache_read_tokens, input_tokens)
        usage = Usage(input_tokens, self._counted + missing, cached_tokens)
        rest = Delta(text, missing, cached_tokens=cached_tokens)
        return (rest if text or missing or cached_tokens else None), Completion(
            reason, usage, self._queue_wait_s
        )
