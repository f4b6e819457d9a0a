"""Converts a worker's stream of chunks to the port's deltas and completion; sans-I/O."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, groupby
from typing import Annotated

import msgspec

from budgeting.values import Tool, ToolChoiceMode, ToolKind
from gateway.backends.port import Completion, Work
from gateway.backends.tool_bodies import form_warnings
from gateway.backends.tool_deltas import CallNotAllowed, ToolCallDelta, ToolCallReader
from gateway.backends.workers.chunk_repair import MAX_COUNT, Halves, repaired
from gateway.backends.workers.dialect import MAX_ECHO_BYTES
from gateway.backends.workers.errors import BadHttp, ConnectionLost
from gateway.backends.workers.logprobs import LogprobReader, WorkerLogprobs
from gateway.backends.workers.refusal import failure_in_stream
from gateway.contracts.events import Delta, IllegalEvent, Reasoning, counted
from gateway.contracts.sse import MAX_EVENT_BYTES, EventReader, EventTooLarge
from gateway.contracts.values import FinishReason, TokenLogprob, Usage
from resilience.failures import BackendFailure, FailureKind, invalid_input

EVENT_STREAM = "text/event-stream"
DONE = b"[DONE]"

_REASONS: Mapping[str, FinishReason] = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "model_length": FinishReason.LENGTH,  # Mistral: the model's context is full
    "max_tokens": FinishReason.LENGTH,
    "repetition": FinishReason.LENGTH,  # vLLM's repetition_detection
    "tool_calls": FinishReason.TOOL_CALLS,
    "content_filter": FinishReason.CONTENT_FILTER,
    "safety": FinishReason.CONTENT_FILTER,
    "error": FinishReason.ERROR,
    "insufficient_system_resource": FinishReason.ERROR,  # DeepSeek
}

_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
_NULL = msgspec.Raw(b"null")
_NO_ERROR = (b"null", b'""', b"false", b"{}")


class _Message(msgspec.Struct, gc=False):
    content: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    delta: _Message | None = None
    message: None = None  # of a whole answer; `repaired` makes it a delta
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # vLLM's: the stop string, or the id of a stop token
    matched_stop: int | str | None = None  # the same of SGLang
    logprobs: WorkerLogprobs | None = None
    token_ids: tuple[int, ...] | None = None


class _Details(msgspec.Struct, gc=False):
    cached_tokens: _Count | None = None
    cache_write_tokens: _Count | None = None
    reasoning_tokens: _Count | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    total_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None


class _Timings(msgspec.Struct):
    queue_wait_ms: float | None = None


class _Sluice(msgspec.Struct):
    finish_reason: str | None = None
    fallback: msgspec.Raw = _NULL
    timings: _Timings | None = None


class _Metrics(msgspec.Struct):
    queue_time_ms: float | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw = _NULL
    sluice: _Sluice | None = None
    metrics: _Metrics | None = None


# Replaces a message whose events have been read, so that its tokens are counted like those of a text.
_COUNTED = _Message("-")
_WHOLE = (FinishReason.STOP, FinishReason.TOOL_CALLS)
# As constants, as in ``gateway.contracts.values``.
STOP, LENGTH, ERROR = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR
_chunk = msgspec.json.Decoder(_Chunk).decode
_lax_chunk = msgspec.json.Decoder(_Chunk, strict=False).decode


_ECHO = b'"prompt_token_ids":['  # cannot be a part of a string, in which quotes are escaped


def _without_echo(data: bytes) -> bytes:
    """The data without the prompt's ids, which vLLM repeats: copying them takes longer than all the rest."""
    start = data.find(_ECHO) + len(_ECHO)
    end = data.find(b"]", start) if start >= len(_ECHO) else -1
    return data[:start] + data[end:] if end >= 0 else data


class CompletionReader:
    """Reads one answer, its reasoning and tool calls included.

    The chunks of one read become one delta for each text. A chunk with text counts as many tokens as it has
    ids or log-probabilities, else as one. Tokens that only the worker's usage reports come with a last, empty
    delta. Chunks without text make no delta, since a delta counts as delivered output; their ids come with
    the next text.
    ``started`` turns true with the first chunk of an answer, ``done`` with the stream's ``[DONE]``.
    ``has_usage``: whether the worker has reported the tokens of prompt and answer; known after
    :meth:`finish`. A report of zeros is none.

    Args:
        running_counts: each chunk's usage reports the number of tokens of its text so far.
        custom_tools: whether the worker knows custom tools; else it calls them as functions.
    """

    def __init__(
        self,
        work: Work,
        token_bytes: Callable[[int], bytes],
        *,
        running_counts: bool = False,
        custom_tools: bool = True,
    ) -> None:
        self._work = work
        self._running_counts = running_counts
        self._custom_tools = custom_tools
        self._counts: dict[int, int] = {}
        self._ids: dict[int, list[int]] = {}
        self.fault: BadHttp | BackendFailure | None = None
        self._halves: Halves = {}
        self._events = EventReader(MAX_ECHO_BYTES if work.sampling.echo else MAX_EVENT_BYTES)
        self._has_logprobs = False
        self._logprobs = LogprobReader(work.sampling.logprobs or 0, token_bytes)
        self._warnings: tuple[str, ...] = ()
        wrapped: tuple[Tool, ...] = ()
        if work.tools and not custom_tools:
            wrapped = tuple([one for one in work.tools if one.kind is ToolKind.CUSTOM])
            self._warnings = tuple(
                [
                    f"the form of the input of tool {one.name} is described to the model, not enforced"
                    for one in wrapped
                    if one.has_grammar
                ]
            )
        names = [one.name for one in work.tools] if work.tools else ()
        wrapped_names = [one.name for one in wrapped] if wrapped else ()
        choice = work.tool_choice
        self._tools = ToolCallReader(
            work.generation_id,
            wrapped_names,
            names,
            () if choice is None else choice.allowed,
            interleaved=True,
            single=work.parallel_tool_calls is False,
            may_call=choice is None or choice.mode is not ToolChoiceMode.NONE,
        )
        self._reasons: dict[int, str] = {}
        self._usage: _Usage | None = None
        self.has_usage = False
        self._sluice: _Sluice | None = None
        self._queue_wait_s = 0.0
        self._stop: str | None = None
        self._began: set[int] = set()  # choices that have text; the first may be missing
        self._stopped: set[int] = set()  # choices that a stop string ended
        self._refused: set[int] = set()  # choices whose text is a refusal
        self._counted = 0
        self.started = False
        self.done = False

    def feed(self, data: bytes) -> list[Delta]:
        """The deltas that ``data`` completes. Then read ``fault``: the stream may have failed.

        Raises BadHttp: an event is too long, or of a text that was not requested; BackendFailure: the model
        called a tool that is not allowed.
        """
        reader = self._events
        if (
            self.started
            and not (reader.rest or reader.lines)
            and data.startswith(b"data: ")
            and data.endswith(b"\n\n")
            and data.find(b"\n") == len(data) - 2
            and data.find(b"\r") < 0
        ):
            events = [data[6:-2]]  # a token's event, whole and alone: without the reader's call
        else:
            try:
                events = reader.feed(data if self.started else _without_echo(data))
            except EventTooLarge as error:
                raise BadHttp(str(error)) from None
        if events and not self.started:
            events[0] = _without_echo(events[0])  # if it came in several pieces
        if DONE in events:
            self.done = True
            events = events[: events.index(DONE)]
        chunks: list[_Chunk] = []
        try:
            chunks.extend(map(_chunk, events))  # the chunks before a malformed one are kept
            if len(chunks) == 1 and (choices := chunks[0].choices) and not (self._ids or self._tools.began):
                # The common case, a piece of a plain stream's text: a fast path.
                # Field by field: to make such a chunk and compare the two takes twice as long.
                chunk, choice = chunks[0], choices[0]
                ids, message = choice.token_ids, choice.delta
                text = choice.text if message is None else message.content
                if (
                    text
                    and len(choices) == 1
                    and chunk.error is _NULL
                    and choice.logprobs is None
                    and not (chunk.usage or chunk.sluice or chunk.metrics)
                    and not (choice.index or choice.finish_reason)
                    and (message is None or not (message.refusal or message.tool_calls))
                    and (message is None or not (message.reasoning or message.reasoning_content))
                ):
                    count = 1 if ids is None else len(ids)
                    self.started = True
                    self._counted += count
                    return [Delta(text, count, None, None, 0, (), ids or ())]
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._repair(events, chunks)
        # A chunk without the field has the default itself.
        if failed := [one for one in chunks if one.error is not _NULL and bytes(one.error) not in _NO_ERROR]:
            self.done = False
            chunks, self.fault = chunks[: chunks.index(failed[0])], failure_in_stream(bytes(failed[0].error))
        return self._in_order(chunks) if self._tools.began or _have_events(chunks) else self._joined(chunks)

    def _repair(self, events: list[bytes], chunks: list[_Chunk]) -> None:
        """Read the events after those of ``chunks``, the first of which is no chunk of the contract."""
        try:
            for event in events[len(chunks) :]:
                if event.strip() == DONE:
                    self.done = True
                    return
                chunks.append(_lax_chunk(repaired(event, self._halves)))
        except (ValueError, TypeError, RecursionError):
            self.done = False
            self.fault = BadHttp("an event of the stream is not a chunk of OpenAI's contract")

    def _in_order(self, chunks: list[_Chunk]) -> list[Delta]:
        deltas: list[Delta] = []
        for have_events, group in groupby(chunks, lambda chunk: _have_events((chunk,))):
            if have_events:
                deltas += [delta for chunk in group for delta in self._with_events(chunk)]
            else:
                deltas += self._after_calls(self._joined(list(group)))
        if self._tools.began:
            for index, reason in self._reasons.items():
                cut = _REASONS.get(reason, FinishReason.STOP) not in _WHOLE
                deltas += self._tools.end(index, cut=cut, stopped=index in self._stopped)
        return deltas

    def _after_calls(self, deltas: list[Delta]) -> list[Delta]:
        """The deltas; each text comes after the end of its choice's open tool call."""
        if not self._tools.began:
            return deltas
        return [one for delta in deltas for one in (self._tools.between(delta) if delta.text else (delta,))]

    def _with_events(self, chunk: _Chunk) -> list[Delta]:
        """The deltas of a chunk that has more than text; a choice's first delta has all its tokens."""
        events: dict[int, list[Delta]] = {}
        for choice in chunk.choices or ():
            message, index = choice.delta, choice.index
            if message is None:
                continue
            reasoning = message.reasoning or message.reasoning_content
            if not (reasoning or message.tool_calls or message.refusal):
                continue
            made, calls = events.setdefault(index, []), list(message.tool_calls or ())
            try:
                # With several tokens a step, vLLM writes a call's end and the text after it into one chunk.
                while calls and self._tools.continues(index, calls[0]):
                    call = calls.pop(0)
                    made += self._tools.take(index, call, cut=not calls and self._is_cut(choice))
                if reasoning:
                    made += self._tools.between(Reasoning(reasoning, 0, index=index))
                if message.refusal:
                    self._refused.add(index)
                if text := (message.content or "") + (message.refusal or ""):
                    made += self._tools.between(Delta(text, 0, index=index))
                for call in calls:
                    made += self._tools.take(index, call, cut=call is calls[-1] and self._is_cut(choice))
            except CallNotAllowed as error:
                raise BackendFailure(FailureKind.DEGENERATE_OUTPUT, str(error)) from None
            except IllegalEvent as error:
                raise BadHttp(str(error)) from None
            choice.delta = _COUNTED
        deltas: list[Delta] = []
        for delta in self._joined([chunk]):
            found = events.get(delta.index)
            deltas += self._after_calls([delta]) if found is None else counted(found, delta)
        return deltas

    def _is_cut(self, choice: _Choice) -> bool:
        """Whether the token limit or a stop string ends the choice with this chunk."""
        stop = choice.stop_reason or choice.matched_stop
        return choice.finish_reason == FinishReason.LENGTH or stop in self._work.sampling.stop

    def _joined(self, chunks: list[_Chunk]) -> list[Delta]:
        texts: dict[int, list[str]] = {}
        logprobs: dict[int, list[TokenLogprob]] = {}
        # Tokens of a choice minus its pieces of text.
        more: dict[int, int] = {}
        reported: dict[int, int] = {}
        running = self._running_counts
        for chunk in chunks:
            usage = chunk.usage
            for choice in chunk.choices or ():
                index, delta = choice.index, choice.delta
                text = choice.text if delta is None else delta.content
                if choice.token_ids is not None:
                    self._ids.setdefault(index, []).extend(choice.token_ids)
                if choice.logprobs is not None:
                    self._has_logprobs = True
                    read = self._logprobs.read(choice.logprobs)
                    logprobs.setdefault(index, []).extend(read)
                    more[index] = more.get(index, 0) + len(read) - 1
                    texts.setdefault(index, []).append(text or "")
                elif text:
                    if index in texts:
                        texts[index].append(text)
                    else:
                        texts[index] = [text]
                if running and usage is not None:
                    reported[index] = usage.completion_tokens or 0
                # Some servers send "" or "null" until the end, or a reason with details.
                if choice.finish_reason and choice.finish_reason != "null":
                    self._reasons[index] = choice.finish_reason.partition(":")[0].lower()
                    stop = choice.stop_reason or choice.matched_stop
                    if stop in self._work.sampling.stop:
                        self._stopped.add(index)
                        if index == 0:
                            self._stop = str(stop)
                self.started = True
            if usage is not None:
                self._usage = usage
            if chunk.sluice is not None:
                self._sluice = chunk.sluice
            if chunk.metrics is not None:
                self._queue_wait_s = (chunk.metrics.queue_time_ms or 0.0) / 1000
        deltas = []
        for index, pieces in texts.items():
            if not 0 <= index < self._work.sampling.n:
                raise BadHttp(f"the stream has a choice {index} of {self._work.sampling.n} asked for")
            self._began.add(index)
            count, ids = len(pieces) + more.get(index, 0), self._ids.pop(index, None)
            if ids is not None:
                count = len(ids)
            elif index in reported:
                count = max(0, reported[index] - self._counts.get(index, 0))
                self._counts[index] = reported[index]
            self._counted += count
            entries = logprobs.get(index, ())
            deltas.append(Delta("".join(pieces), count, None, None, index, tuple(entries), tuple(ids or ())))
        return deltas

    @property
    def ended(self) -> bool:
        """Whether every text has its finish reason: nothing but the usage may follow."""
        return len(self._reasons) == self._work.sampling.n

    def finish(self) -> tuple[Delta | None, Completion]:
        """A last delta with the tokens not counted yet, and the completion. Call after the stream's end.

        Raises:
            ConnectionLost: the stream ended before every text did.
            BackendFailure: the worker ended a text with an error, or aborted it, or ignored ``n``.
        """
        n = self._work.sampling.n
        if 0 in self._reasons and len(self._reasons) < n and self._began <= self._reasons.keys():
            raise invalid_input(f"the worker gives fewer texts than the n of {n} asks for", "n")
        if len(self._reasons) < n:
            raise ConnectionLost("the stream ended before the answer did")
        if ERROR in map(_REASONS.get, self._reasons.values()):
            raise failure_in_stream(b'{"message": "a text ended with finish_reason error"}')
        if "abort" in self._reasons.values():  # not by this gateway, which stops reading before it aborts
            raise BackendFailure(FailureKind.PREEMPTED, "the worker aborted the request")
        usage = self._usage
        ids = list(chain.from_iterable(self._ids.get(index, ()) for index in range(n))) if self._ids else []
        output_tokens, cached_tokens, written, reasoning = self._counted + len(ids), 0, 0, 0
        input_tokens, partial = (usage and usage.prompt_tokens) or 0, self._work.partial
        if partial is not None:
            # The worker counts the tokens of a partial answer as prompt tokens. Of ids the count is known.
            counts = partial.token_ids is None and partial.tokens
            input_tokens = input_tokens - partial.tokens if counts else 0
        if input_tokens <= 0:
            input_tokens = self._work.input_tokens
        if usage is not None:
            if usage.completion_tokens or (usage.completion_tokens == 0 and not output_tokens):
                self.has_usage, output_tokens = bool(usage.prompt_tokens), usage.completion_tokens
            if usage.completion_tokens_details is not None:
                reasoning = usage.completion_tokens_details.reasoning_tokens or 0
            # xAI and Gemini bill reasoning beside the completion; Gemini reports it in the total alone.
            beside = (usage.total_tokens or 0) - (usage.prompt_tokens or 0) - output_tokens
            if self.has_usage and beside > 0 and reasoning in (0, beside):
                reasoning = beside
                output_tokens += beside
            reasoning = min(reasoning, output_tokens) if reasoning else 0
            if usage.prompt_tokens_details is not None:
                cached_tokens = min(usage.prompt_tokens_details.cached_tokens or 0, input_tokens)
                if of_cache := usage.prompt_tokens_details.cache_write_tokens:
                    written = min(of_cache, input_tokens - cached_tokens)
        missing = output_tokens - self._counted
        known = tuple(ids) if n == 1 and len(ids) == missing else ()
        rest = Delta("", missing, token_ids=known) if missing > 0 else None
        first, *others = map(self._reason, range(n))
        wait_s = self._queue_wait_s
        if self._work.sampling.logprobs is not None and not self._has_logprobs:
            self._warnings += ("the worker gave no log-probabilities",)
        if (tools := self._work.tools) and not (
            self._custom_tools or self._tools.began or any(tool.strict for tool in tools)
        ):
            self._warnings += form_warnings(self._work)
        if self._sluice is not None:
            first, wait_s = self._of_sluice(self._sluice, first)
        completion = Completion(
            first,
            Usage(input_tokens, output_tokens, cached_tokens, reasoning, written),
            wait_s,
            tuple(others),
            warnings=(*self._warnings, self._tools.left_out) if self._tools.left_out else self._warnings,
            stop_sequence=None if first is LENGTH else self._stop,
        )
        return rest, completion

    def _reason(self, index: int) -> FinishReason:
        """A choice's finish reason.

        A complete choice with calls has the reason ``tool_calls``. Workers report ``stop`` for it when the
        request named the tool, and also when a stop string has cut the call (``length`` here).
        """
        reason = _REASONS.get(self._reasons[index], STOP)
        if reason not in _WHOLE:
            return reason
        if index in self._stopped and self._tools.in_call(index):
            return FinishReason.LENGTH
        if index in self._refused:
            return FinishReason.CONTENT_FILTER
        called = self._tools.began and self._tools.has_calls(index)
        return FinishReason.TOOL_CALLS if called else STOP

    def _of_sluice(self, reported: _Sluice, first: FinishReason) -> tuple[FinishReason, float]:
        """Finish reason and queue wait, in seconds, as another Sluice reports; degraded for a fallback."""
        wait_s = (reported.timings.queue_wait_ms or 0.0) / 1000 if reported.timings is not None else 0.0
        if reported.fallback != _NULL:
            return FinishReason.DEGRADED, wait_s
        try:
            return FinishReason(reported.finish_reason or ""), wait_s
        except ValueError:
            return first, wait_s


def _have_events(chunks: Sequence[_Chunk]) -> bool:
    """Whether a choice of the chunks has more than text. One call for all chunks, for speed."""
    for chunk in chunks:
        for choice in chunk.choices or ():
            message = choice.delta
            if message is not None and (
                message.tool_calls or message.reasoning or message.reasoning_content or message.refusal
            ):
                return True
    return False
