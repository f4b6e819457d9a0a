"""Converts Bedrock's events and answers to the port's events and completion."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from engine.text import StopStrings
from gateway.backends.bedrock.tools import ConverseTools
from gateway.backends.port import Completion
from gateway.backends.tool_deltas import CALLS_NOT_ALLOWED, ToolCallDelta, ToolCallReader, ToolText
from gateway.contracts.events import Delta, IllegalEvent, Reasoning, ToolArgs, ToolBegin, ToolEnd, counted
from gateway.contracts.values import FinishReason, Usage
from resilience.failures import BackendFailure, FailureKind

# More than the average bytes per token in almost any text, so that a count by it is not too high. That count
# is used until Bedrock reports its own one at the end, since an answer may be cut short before.
BYTES_A_TOKEN = 8

# All others are a stop. A guardrail's text is the answer that the operator wants; an answer cut by a content
# filter is incomplete.
_FINISH: Mapping[str, FinishReason] = {
    "max_tokens": FinishReason.LENGTH,
    "model_context_window_exceeded": FinishReason.LENGTH,
    "content_filtered": FinishReason.CONTENT_FILTER,
    "malformed_model_output": FinishReason.ERROR,
}
CALLS_WITHOUT_TOOLS = "the request has no tools: the calls of the model are left out"
_ALONE = frozenset({ToolBegin, ToolEnd})  # pieces that are never joined with others
# The stop reasons after which the caller is to answer the calls of an answer, if it has calls.
_AFTER_CALLS = frozenset({"tool_use", "end_turn"})


@dataclass(frozen=True, slots=True)
class ConverseStop:
    """Bedrock's stop reason, and the stop string that ended the answer where the model names it."""

    reason: str
    sequence: str | None = None


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


@dataclass(frozen=True, slots=True)
class InvokedModel:
    """The answer of InvokeModel; ``input_tokens`` are those of its header, 0 where it has none."""

    body: bytes
    input_tokens: int


# A ``Delta`` has no token count yet; a ``ToolBegin`` has the tool's name as it was sent to Bedrock. A ``str``
# is a warning for the caller: what was changed in the request because the model refuses it.
Event = Delta | ConverseStop | ConverseUsage | InvokedModel | str


def events_of_stream(stream: Iterable[Mapping[str, Any]]) -> Iterator[Event]:
    """The events of ``converse_stream``; signatures of reasoning and citations are left out."""
    calls: set[int] = set()  # the blocks that are calls
    for event in stream:
        if "contentBlockDelta" in event:
            delta = event["contentBlockDelta"]["delta"]
            if text := delta.get("text"):
                yield Delta(text, 0)
            elif text := delta.get("toolUse", _NOTHING).get("input"):
                yield ToolArgs(text, 0)
            elif text := delta.get("reasoningContent", _NOTHING).get("text"):
                yield Reasoning(text, 0)
        elif "contentBlockStart" in event:
            started = event["contentBlockStart"]
            if (call := started["start"].get("toolUse")) is not None:
                calls.add(started["contentBlockIndex"])
                yield ToolBegin(call["name"], 0, id=call["toolUseId"])
        elif "contentBlockStop" in event:
            if event["contentBlockStop"]["contentBlockIndex"] in calls:
                yield ToolEnd("", 0)
        elif "messageStop" in event:
            yield _stop(event["messageStop"])
        elif "metadata" in event:
            yield _usage(event["metadata"])


def events_of_answer(answer: Mapping[str, Any]) -> Iterator[Event]:
    """The same events, from an answer of ``converse``."""
    for block in answer["output"]["message"]["content"]:
        if block.get("text"):
            yield Delta(block["text"], 0)
        elif call := block.get("toolUse"):
            yield ToolBegin(call["name"], 0, id=call["toolUseId"])
            yield ToolArgs(json.dumps(call["input"], ensure_ascii=False, separators=(",", ":")), 0)
            yield ToolEnd("", 0)
        elif text := block.get("reasoningContent", _NOTHING).get("reasoningText", _NOTHING).get("text"):
            yield Reasoning(text, 0)
    yield _stop(answer)
    yield _usage(answer)


_NOTHING: Mapping[str, Any] = {}


def _stop(end: Mapping[str, Any]) -> ConverseStop:
    fields = end.get("additionalModelResponseFields")
    named = fields.get("stop_sequence") if isinstance(fields, Mapping) else None
    return ConverseStop(end["stopReason"], named if isinstance(named, str) else None)


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

    Calls get the caller's names of tools. Calls that the answer may not have are left out.

    Args:
        queue_wait_s: how long the request waited for a thread.
        estimated_input: the prompt's tokens, used when Bedrock reports none.
        share: the share of the request's own prompt in the input that Bedrock counts; the rest of the input
            is a partial answer.
    """

    def __init__(
        self,
        tools: ConverseTools,
        queue_wait_s: float,
        estimated_input: int,
        share: float = 1.0,
        stops: Sequence[str] = (),
    ) -> None:
        self._tools = tools
        self._calls = ToolCallReader(tools.generation_id, tools.custom, allowed=tools.allowed)
        self._begun = 0  # calls of the answer
        self._left_out = 0  # calls of the model that the caller does not get
        self._is_given = False  # whether the caller gets the last call, which has not ended
        self._has_stopped = False  # whether that call has all its arguments
        self._blank = StopStrings([stop for stop in stops if stop and not stop.strip()])
        self._queue_wait_s = queue_wait_s
        self._estimated_input = estimated_input
        self._share = share
        self._bytes = 0
        self._pieces = 0
        self._counted = 0
        self._reasoning = 0
        self._given = False
        self._stops = tuple(stops_for_bedrock(stops))
        self._reason: str | None = None
        self._sequence: str | None = None
        self._adjusted: list[str] = []
        self.usage: ConverseUsage | None = None

    @property
    def stopped(self) -> bool:
        return self._reason is not None

    @property
    def cut(self) -> bool:
        """Whether a stop string that was not sent to Bedrock has ended the answer before the model did."""
        return self._blank.matched is not None

    @property
    def complete(self) -> bool:
        return self.cut or (self.stopped and self.usage is not None)

    def feed(self, events: Iterable[Event]) -> list[Delta]:
        """Take events; returns the answer's pieces in them, with pieces of one kind in a row joined.

        Raises BackendFailure: ``degenerate_output``: the model could not write its call, or called a tool
        that is not allowed.
        """
        given: list[Delta] = []
        run: list[Delta] = []
        for event in events:
            if isinstance(event, Delta):
                if run and (event.__class__ is not run[0].__class__ or event.__class__ in _ALONE):
                    given += self._joined(run)
                    run = []
                run.append(event)
            elif isinstance(event, ConverseStop):
                self._reason, self._sequence = event.reason, event.sequence
            elif isinstance(event, ConverseUsage):
                self.usage = event
            elif isinstance(event, str):
                self._adjusted.append(event)
        if run:
            given += self._joined(run)
        if self._reason == "malformed_tool_use":
            raise BackendFailure(
                FailureKind.DEGENERATE_OUTPUT, "the model could not write its tool call (malformed_tool_use)"
            )
        if given and not self._given:
            self._given = True
            given[0] = structs.replace(given[0], queue_wait_s=self._queue_wait_s)
        return given

    def _joined(self, run: Sequence[Delta]) -> list[Delta]:
        """Count and join pieces of one kind; returns what the caller gets of them."""
        text = run[0].text if len(run) == 1 else "".join([piece.text for piece in run])
        before = self._counted
        if text:
            self._pieces += len(run)
            self._bytes += len(text.encode("utf-8", "replace"))
            self._counted = max(self._pieces, self._bytes // BYTES_A_TOKEN)
        tokens = self._counted - before
        if not self._is_given and run[0].__class__ is Delta:
            return [Delta(self._uncut(text), tokens)]
        if isinstance(run[0], Reasoning):
            self._reasoning += tokens
        return self._take(structs.replace(run[0], text=text, tokens=tokens))

    def _uncut(self, text: str) -> str:
        """The part of the answer's next text that comes before a stop string of white space."""
        return "" if self.cut else self._blank.push(text)

    def _take(self, piece: Delta) -> list[Delta]:
        """The piece as the caller gets it, after the events that must come before it."""
        if isinstance(piece, ToolArgs):
            return self._call(piece, ToolText(arguments=piece.text)) if self._is_given else [_empty(piece)]
        if isinstance(piece, ToolEnd):
            self._has_stopped = True
            return []
        before = self._end_call()
        if piece.__class__ is Delta:
            return [*before, structs.replace(piece, text=self._uncut(piece.text))]
        if self.cut:
            return [_empty(piece)]
        if held := self._blank.flush():
            before.append(Delta(held, 0))
        if not isinstance(piece, ToolBegin):
            return [*before, piece]
        if not self._tools.may_call or (self._tools.single and self._begun):
            self._left_out += 1
            return [*before, _empty(piece)]
        self._begun += 1
        self._is_given, self._has_stopped = True, False
        return [*before, *self._call(piece, ToolText(self._tools.original(piece.text)))]

    def _call(self, piece: ToolBegin | ToolArgs, text: ToolText) -> list[Delta]:
        """The events of a piece of the last call."""
        call_id = piece.id if isinstance(piece, ToolBegin) else None
        try:
            events = self._calls.take(0, ToolCallDelta(self._begun, call_id, text))
        except IllegalEvent as error:
            raise BackendFailure(FailureKind.DEGENERATE_OUTPUT, str(error)) from error
        return counted(events, piece)

    def _end_call(self) -> list[Delta]:
        """The end of the last call, once it is known that the model's limit did not cut it."""
        ended = self._calls.end(0) if self._is_given and self._has_stopped else []
        self._is_given = False
        return ended

    def finish(self) -> tuple[list[Delta], Completion]:
        """The last pieces, with the tokens that are not counted yet, and the completion."""
        reason = _FINISH.get(self._reason or "", FinishReason.STOP)
        if self.cut:
            reason = FinishReason.STOP
        elif self._begun and self._reason in _AFTER_CALLS:
            reason = FinishReason.TOOL_CALLS
        rest = self._end_call() if reason in (FinishReason.STOP, FinishReason.TOOL_CALLS) else []
        text, missing, cached_tokens = self._blank.flush(), 0, None
        usage = Usage(self._estimated_input, self._counted)
        if (counted := self.usage) is not None:
            # Bedrock bills its own count, even if more tokens were counted while the answer came.
            missing = max(0, counted.output_tokens - self._counted)
            input_tokens = round(counted.input_tokens * self._share)
            cached_tokens = min(counted.cache_read_tokens, input_tokens)
            written = min(counted.cache_write_tokens, input_tokens - cached_tokens)
            usage = Usage(input_tokens, counted.output_tokens, cached_tokens, cache_write_tokens=written)
        if text or missing or cached_tokens:
            rest.append(Delta(text, missing, cached_tokens=cached_tokens))
        usage = structs.replace(usage, reasoning_tokens=min(self._reasoning, usage.output_tokens))
        completion = Completion(
            reason,
            usage,
            self._queue_wait_s,
            warnings=self._warnings(),
            stop_sequence=self._stop_sequence(),
            context_full=self._reason == "model_context_window_exceeded",
        )
        return rest, completion

    def _stop_sequence(self) -> str | None:
        """The stop string that ended the answer: the request's only one, else the one the model names."""
        if self.cut:
            return self._blank.matched
        if self._reason != "stop_sequence":
            return None
        return self._stops[0] if len(self._stops) == 1 else self._sequence

    def _warnings(self) -> tuple[str, ...]:
        if not self._left_out:
            return tuple(self._adjusted)
        if self._tools.may_call:
            why = (
                "parallel_tool_calls is false: the first call of the model is given, "
                f"and {self._left_out} more were left out"
            )
        else:
            why = CALLS_NOT_ALLOWED if self._tools.offered else CALLS_WITHOUT_TOOLS
        return (*self._adjusted, why)


def _empty(piece: Delta) -> Delta:
    """Only the piece's tokens: the caller does not get its text."""
    return Delta("", piece.tokens)


def stops_for_bedrock(stops: Sequence[str]) -> list[str]:
    """The stop strings that models accept: Claude refuses those of white space alone, and the reader cuts
    the answer before them.
    """
    return [stop for stop in stops if stop.strip()]
