"""Reads the events of an answer with vLLM's parsers, one for each choice; does not import vLLM."""

import codecs
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from gateway.backends.tool_deltas import ToolCallDelta, ToolCallReader, ToolText
from gateway.contracts.events import Delta, IllegalEvent, Reasoning
from gateway.contracts.values import FinishReason
from resilience.failures import BackendFailure, FailureKind


@dataclass(eq=False, kw_only=True)
class AnswerParser:
    """Parses one answer.

    Args:
        parsers: vLLM's, one for each choice.
        request: vLLM's request, as its parser adjusted it.
        prompt_ids: the prompt; reasoning may begin or end in it.
        generation_id: unique, for the ids of calls that have none.
        singly: whether the parsers take one token at a time.
        late: whether vLLM holds back text that may begin a stop string. The parsers get tokens with their
            text, since some find marks by tokens.
        allowed: the names of the tools that may be called; empty: any.
        form_warnings: for the caller.
        options: of the request to vLLM.
    """

    parsers: Sequence[Any]
    request: Any
    prompt_ids: list[int]
    generation_id: str
    token_bytes: Callable[[int], bytes]
    singly: bool
    late: bool
    allowed: Collection[str]
    form_warnings: tuple[str, ...]
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        names = [tool.function.name for tool in self.request.tools or ()]
        single = self.request.parallel_tool_calls is False
        self._calls = ToolCallReader(self.generation_id, names=names, allowed=self.allowed, single=single)
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in self.parsers]
        # Each choice's text and tokens, with the lengths of their texts, that the parser has not got.
        self._texts = [""] * len(self.parsers)
        self._waiting: list[list[tuple[int, int]]] = [[] for _ in self.parsers]

    def take(
        self,
        index: int,
        text: str,
        ids: Sequence[int],
        *,
        finished: bool = False,
        whole: bool = False,
        stopped: bool = False,
    ) -> list[Delta]:
        """The events of a choice's next text, without tokens.

        Args:
            finished: this text is the choice's last one.
            whole: the text is the last one of a choice that was not cut short.
            stopped: a stop string ended the choice, perhaps inside a call.

        Raises BackendFailure: the parser failed, or its result is not a valid answer.
        """
        pieces = [(text, list(ids))]
        if self.singly or self.late:
            pieces = self._pieces(index, text, ids, finished=finished)
        events: list[Delta] = []
        try:
            for number, (piece, piece_ids) in enumerate(pieces, 1):
                message = self.parsers[index].parse_delta(
                    piece,
                    piece_ids,
                    self.request,
                    self.prompt_ids,
                    finished=finished and number == len(pieces),
                )
                if message is not None:
                    events += self._events(index, message, cut=finished and (stopped or not whole))
        except IllegalEvent as error:
            raise BackendFailure(FailureKind.DEGENERATE_OUTPUT, str(error)) from error
        except Exception as error:
            raise BackendFailure(
                FailureKind.DEGENERATE_OUTPUT, f"vLLM's parser failed: {type(error).__name__}"
            ) from error
        if whole:
            events += self._calls.end(index)
        return events

    def rest(self, ids: Sequence[int], delivered: str | None) -> list[Delta]:
        """Parse the tokens of a partial answer.

        Returns the events after its ``delivered`` text, which is text alone; all events if that is ``None``.
        """
        # The bytes of an incomplete last character come with the next token's text.
        text = codecs.utf_8_decode(b"".join(map(self.token_bytes, ids)), "replace")[0]
        whole = self.take(0, text, ids)
        if delivered is None:
            return whole
        left, events = len(delivered), []
        for event in whole:
            skipped = min(left, len(event.text)) if event.__class__ is Delta else 0
            left -= skipped
            if rest := event.text[skipped:]:
                events.append(structs.replace(event, text=rest))
        return events

    @property
    def warnings(self) -> tuple[str, ...]:
        return (*self.form_warnings, self._calls.left_out) if self._calls.left_out else self.form_warnings

    def reason(self, index: int, reason: FinishReason) -> FinishReason:
        """A choice's finish reason: ``tool_calls`` if it stopped after calls, else ``reason``."""
        if reason is FinishReason.STOP and self._calls.has_calls(index):
            return FinishReason.TOOL_CALLS
        return reason

    def _pieces(
        self, index: int, text: str, ids: Sequence[int], *, finished: bool
    ) -> list[tuple[str, list[int]]]:
        """The text in one piece per token. Unless text is held back, the last piece is what remains."""
        decoder, waiting = self._decoders[index], self._waiting[index]
        # The decoder keeps the bytes of a character that ends in a later text's tokens.
        waiting += [(token, len(decoder.decode(self.token_bytes(token)))) for token in ids]
        text, held = self._texts[index] + text, self.late and not finished
        pieces, start = list[tuple[str, list[int]]](), 0
        while waiting and not (held and start + waiting[0][1] > len(text)):
            token, length = waiting.pop(0)
            pieces.append((text[start : start + length], [token]))
            start += length
        self._texts[index] = text[start:] if held else ""
        if not held:
            last, tokens = pieces.pop() if pieces else ("", [])
            pieces.append((last + text[start:], tokens))
        return pieces

    def _events(self, index: int, message: Any, *, cut: bool) -> list[Delta]:
        """The events of one message of the parser: what belongs to the open call comes first."""
        calls = [_entry(call) for call in message.tool_calls or ()]
        events: list[Delta] = []
        while calls and self._calls.continues(index, calls[0]):
            events += self._calls.take(index, calls.pop(0))
        if message.reasoning:
            events += self._calls.between(Reasoning(message.reasoning, 0, index=index))
        if message.content:
            events += self._calls.between(Delta(message.content, 0, index=index))
        for call in calls:
            events += self._calls.take(index, call, cut=cut)
        return events


def _entry(call: Any) -> ToolCallDelta:
    called = call.function
    function = None if called is None else ToolText(called.name, called.arguments)
    return ToolCallDelta(call.index, call.id, function)
