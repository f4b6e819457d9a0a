"""Reads Bedrock's events and answers; joins them to the port's deltas and completion."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from gateway.backends.port import Completion
from gateway.contracts.events import Delta
from gateway.contracts.values import FinishReason, Usage

# Above the average bytes of a token in almost any text, so that a count by it is not too high. It replaces
# Bedrock's own count, which comes at the end, while an answer may still be cut short.
BYTES_A_TOKEN = 8

# A guardrail's text is the answer that the operator wants; an answer that a filter has cut is incomplete.
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


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Some of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ConverseStop:
    """Bedrock's stop reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class ConverseUsage:
    """Bedrock's token counts; ``fresh_tokens`` were neither read from nor written to the cache."""

    fresh_tokens: int
    cache_read_tokens: int
    cache_write_tokens: int
    output_tokens: int
    latency_ms: int

    @property
    def input_tokens(self) -> int:
        """The whole prompt."""
        return self.fresh_tokens + self.cache_read_tokens + self.cache_write_tokens


Event = TextPiece | ConverseStop | ConverseUsage


def events_of_stream(stream: Iterable[Mapping[str, Any]]) -> Iterator[Event]:
    """The events of ``converse_stream``; thinking and citations are not requested."""
    for event in stream:
        if "contentBlockDelta" in event:
            text = event["contentBlockDelta"]["delta"].get("text")
            if text:
                yield TextPiece(text)
        elif "messageStop" in event:
            yield ConverseStop(event["messageStop"]["stopReason"])
        elif "metadata" in event:
            yield _usage(event["metadata"])


def events_of_answer(answer: Mapping[str, Any]) -> Iterator[Event]:
    """The answer of ``converse`` as the same events."""
    for block in answer["output"]["message"]["content"]:
        if block.get("text"):
            yield TextPiece(block["text"])
    yield ConverseStop(answer["stopReason"])
    yield _usage(answer)


def _usage(metadata: Mapping[str, Any]) -> ConverseUsage:
    usage = metadata["usage"]
    return ConverseUsage(
        fresh_tokens=usage["inputTokens"],
        cache_read_tokens=usage.get("cacheReadInputTokens") or 0,
        cache_write_tokens=usage.get("cacheWriteInputTokens") or 0,
        output_tokens=usage["outputTokens"],
        latency_ms=metadata.get("metrics", {}).get("latencyMs", 0),
    )


class ConverseReader:
    """Counts an answer's pieces as they come, and corrects the count by Bedrock's report at the end.

    Args:
        queue_wait_s: how long the request waited for a thread.
        estimated_input: the prompt's tokens, used when Bedrock reports none.
        share: the share of the request's own prompt in the input that Bedrock counts; the rest is a partial
            answer.
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
        """Whether the model has ended."""
        return self._reason is not None

    @property
    def cut(self) -> bool:
        """Whether the answer has ended before the model, at a stop string that was not sent to Bedrock."""
        return self._blank.reached

    @property
    def complete(self) -> bool:
        """Whether nothing further is needed."""
        return self.cut or (self.stopped and self.usage is not None)

    def feed(self, events: Iterable[Event]) -> Delta | None:
        """Take events; their text as one piece, if they have any."""
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
        """A last piece with what is not counted yet, and the completion."""
        counted, reason = self.usage, _FINISH.get(self._reason or "", FinishReason.STOP)
        if self.cut:
            reason = FinishReason.STOP
        text = self._blank.flush()
        if counted is None:
            usage = Usage(self._estimated_input, self._counted)
            return (Delta(text, 0) if text else None), Completion(reason, usage, self._queue_wait_s)
        # Bedrock's count is billed, also where more were counted as they came.
        missing = max(0, counted.output_tokens - self._counted)
        input_tokens = round(counted.input_tokens * self._share)
        cached_tokens = min(counted.cache_read_tokens, input_tokens)
        usage = Usage(input_tokens, counted.output_tokens, cached_tokens)
        rest = Delta(text, missing, cached_tokens=cached_tokens)
        return (rest if text or missing or cached_tokens else None), Completion(
            reason, usage, self._queue_wait_s
        )


def stops_for_bedrock(stops: Sequence[str]) -> list[str]:
    """The stop strings that models accept: Claude refuses those of white space alone, see ``BlankStops``."""
    return [stop for stop in stops if stop.strip()]


class BlankStops:
    """Ends an answer before the first stop string of white space alone, which models refuse.

    Holds back no more than the white space at the end of the text, while a stop string may start in it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple([stop for stop in stops if stop and not stop.strip()])
        self._held = ""
        self.reached = False

    def push(self, text: str) -> str:
        """The part of the next piece to pass on; nothing once a stop string was ``reached``."""
        if not self._stops:
            return text
        if self.reached:
            return ""
        text, self._held = self._held + text, ""
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.reached = True
            return text[: min(found)]
        most = max(_partial_match(stop, text) for stop in self._stops)
        if most:
            text, self._held = text[:-most], text[-most:]
        return text

    def flush(self) -> str:
        """The text still held, when the answer has ended in another way."""
        held, self._held = self._held, ""
        return held


def _partial_match(stop: str, text: str) -> int:
    """Length of the longest proper prefix of ``stop`` that ``text`` ends with."""
    return next((size for size in range(len(stop) - 1, 0, -1) if text.endswith(stop[:size])), 0)
