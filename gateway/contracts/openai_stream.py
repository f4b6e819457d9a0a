"""OpenAI's streams and dialects; a chunk is preencoded bytes around one JSON string per token."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from budgeting.values import Plan, ToolCall, ToolChoiceMode, ToolKind
from gateway.contracts.answer import Answer, Choice
from gateway.contracts.dialect import ContractDialect, ParsedRequest
from gateway.contracts.events import Delta, Reasoning, ToolArgs, ToolBegin
from gateway.contracts.openai import ChatRequest, CompletionRequest, chat_request, completion_request
from gateway.contracts.openai_answer import (
    FINISH_REASONS,
    REASONING_FIELDS,
    AssistantMessage,
    ChoiceBody,
    ReasoningField,
    error_body,
    error_json,
    sluice_body,
    tool_call_body,
    usage_body,
)
from gateway.contracts.openai_logprobs import Offsets, chat_logprobs, completion_logprobs
from gateway.contracts.origin import RequestOrigin
from gateway.contracts.plain_chat import KnownTools, plain_chat
from gateway.contracts.refusals import parse
from gateway.contracts.values import FinishReason, GenerateRequest, Usage
from gateway.errors import PublicError

DONE: Final = b"data: [DONE]\n\n"


_WITHOUT_CALLS: Final[Mapping[FinishReason, str]] = {**FINISH_REASONS, FinishReason.TOOL_CALLS: "stop"}


class ChunkFrames:
    """The chunks of one stream.

    Everything that is the same in every chunk is encoded once. With ``include_usage`` each chunk contains
    ``"usage":null``, and an additional chunk without choices the usage. The last chunk contains ``sluice``.
    A failed stream ends with OpenAI's error object and no ``[DONE]``. In a chat, each choice's first chunk
    has the role. With ``sluice.token_ids`` each chunk of a text contains the ids of its tokens.
    """

    ping: Final = b""

    def __init__(
        self,
        asked: ParsedRequest,
        *,
        id: str,
        object: str,
        chat: bool,
        model: str,
        reasoning_fields: Sequence[ReasoningField] = REASONING_FIELDS[:1],
    ) -> None:
        request = asked.request
        self._reasoning_fields = reasoning_fields
        self._custom: set[tuple[int, int]] = set()
        head = orjson.dumps({"id": id, "object": object, "created": request.created, "model": model})
        self._usage = asked.include_usage
        self._token_ids = asked.token_ids
        self._base = b"data: " + head[:-1] + b',"choices":['
        self._tail = b',"usage":null}\n\n' if asked.include_usage else b"}\n\n"
        self._chat = chat
        self._reasons = _finish_reasons(request, chat=chat)
        open_text = b'"delta":{"content":' if chat else b'"text":'
        close_text = b"}" if chat else b""
        self._prefix = self._base + b'{"index":0,' + open_text
        self._close = close_text + b',"logprobs":null,"finish_reason":null}]'
        self._suffix = self._close + self._tail
        self.around: tuple[bytes, bytes] | None = (self._prefix, self._suffix)
        if self._token_ids:
            self.around = None
        self._opened = 1
        self._offsets: dict[int, Offsets] = {}

    @property
    def opening(self) -> bytes:
        return self._role(0)

    def delta(self, delta: Delta) -> bytes:
        """One chunk. For plain text it is built around one JSON string, without an object per token."""
        if delta.index == 0 and not delta.logprobs and not self._token_ids:
            return self._prefix + orjson.dumps(delta.text) + self._suffix
        return self._chunk(delta, {"delta": {"content": delta.text}} if self._chat else {"text": delta.text})

    def event(self, event: Delta) -> bytes:
        """One chunk of reasoning or of a tool call; empty for text completions, which have neither."""
        if not self._chat:
            return b""
        delta = self._event_delta(event)
        if not delta and not event.logprobs and not self._token_ids:
            return b""
        return self._chunk(event, {"delta": delta})

    def _chunk(self, event: Delta, own: Mapping[str, object]) -> bytes:
        body = {
            "index": event.index,
            **own,
            "logprobs": self._logprobs(event) if event.logprobs else None,
            "finish_reason": None,
            **({"token_ids": event.token_ids} if self._token_ids else {}),
        }
        return self._open(event.index + 1) + self._base + orjson.dumps(body) + b"]" + self._tail

    def _event_delta(self, event: Delta) -> Mapping[str, object]:
        match event:
            case Reasoning() if event.text:
                return dict.fromkeys(self._reasoning_fields, event.text)
            case ToolBegin():
                call = tool_call_body(ToolCall(event.id, event.text, "", event.kind))
                if event.kind is ToolKind.CUSTOM:
                    self._custom.add((event.index, event.call))
            case ToolArgs() if (event.index, event.call) in self._custom:
                call = {"custom": {"input": event.text}}
            case ToolArgs():
                call = {"function": {"arguments": event.text}}
            case _:
                return {}
        return {"tool_calls": [{"index": event.call, **call}]}

    def finish(self, answer: Answer) -> bytes:
        """The chunks with the finish reasons, the usage if asked for, and ``[DONE]``."""
        choices = answer.choices
        closing = self._open(len(choices)) + self._tail.join(
            [self._closing(answer, index, choice) for index, choice in enumerate(choices)]
        )
        extra = b',"sluice":' + orjson.dumps(sluice_body(answer)) + b"}\n\n"
        if not self._usage:
            return closing + extra + DONE
        usage = orjson.dumps(usage_body(answer.usage))
        return closing + self._tail + self._base + b'],"usage":' + usage + extra + DONE

    def fail(self, error: PublicError, request_id: str) -> bytes:
        return b"data: " + orjson.dumps(error_body(error)) + b"\n\n"

    def _closing(self, answer: Answer, index: int, choice: Choice) -> bytes:
        empty = b'"delta":{}' if self._chat else b'"text":""'
        head = self._base + b'{"index":%d,' % index + empty
        stop = None if index else answer.stop_sequence  # known only for the first choice
        ends = orjson.dumps(self._reasons[choice.finish_reason]), orjson.dumps(stop)
        return head + b',"logprobs":null,"finish_reason":%b,"stop_reason":%b}]' % ends

    def _open(self, count: int) -> bytes:
        """The role chunks of those of the first ``count`` choices whose role has not been sent yet."""
        new = range(self._opened, count)
        self._opened = max(self._opened, count)
        return b"".join([self._role(index) for index in new])

    def _role(self, index: int) -> bytes:
        if not self._chat:
            return b""
        body = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        return self._base + b'{"index":%d,' % index + body + self._tail

    def _logprobs(self, event: Delta) -> object:
        if self._chat:
            return chat_logprobs(event.logprobs)
        return completion_logprobs(event.logprobs, self._offsets.setdefault(event.index, Offsets()))


class RunningUsageFrames(ChunkFrames):
    """Each chunk contains the usage so far, as with vLLM: of all choices, the prompt's tokens as planned."""

    def __init__(self, asked: ParsedRequest, plan: Plan | None, cached_tokens: int, **head: Any) -> None:
        super().__init__(asked, **head)
        self.around = None
        self._show(Usage(0 if plan is None else plan.counts.total, 0, cached_tokens))

    def delta(self, delta: Delta) -> bytes:
        self._count(delta)
        return super().delta(delta)

    def event(self, event: Delta) -> bytes:
        self._count(event)
        return super().event(event)

    def finish(self, answer: Answer) -> bytes:
        self._show(answer.usage)
        return super().finish(answer)

    def _count(self, event: Delta) -> None:
        so_far = self._so_far
        self._show(Usage(so_far.input_tokens, so_far.output_tokens + event.tokens, so_far.cached_tokens))

    def _show(self, usage: Usage) -> None:
        self._so_far = usage
        self._tail = b',"usage":' + orjson.dumps(usage_body(usage)) + b"}\n\n"
        self._suffix = self._close + self._tail


def _finish_reasons(request: GenerateRequest, *, chat: bool) -> Mapping[FinishReason, str]:
    """OpenAI's finish reasons: tool calls end with ``stop`` in text completions and for a named tool."""
    named = request.tool_choice is not None and request.tool_choice.mode is ToolChoiceMode.NAMED
    return FINISH_REASONS if chat and not named else _WITHOUT_CALLS


class OpenAIDialect(ContractDialect):
    """One of OpenAI's paths, as the HTTP edge uses it: chat, or text completions.

    ``reasoning_fields``: the fields of messages and deltas that carry a chat's reasoning.
    """

    def __init__(
        self, *, chat: bool, reasoning_fields: Sequence[ReasoningField] = REASONING_FIELDS[:1]
    ) -> None:
        self._chat = chat
        self._tools = KnownTools()
        self._reasoning_fields = tuple(reasoning_fields)
        self._kind = "chat.completion" if chat else "text_completion"
        self._id_prefix = "chatcmpl-" if chat else "cmpl-"

    def parse(self, body: bytes, origin: RequestOrigin) -> ParsedRequest:
        if self._chat:
            return plain_chat(body, origin, self._tools) or chat_request(parse(ChatRequest, body), origin)
        return completion_request(parse(CompletionRequest, body), origin)

    def whole(self, asked: ParsedRequest, answer: Answer) -> bytes:
        reasons = _finish_reasons(asked.request, chat=self._chat)
        body = {
            "id": self._id_prefix + answer.generation_id,
            "object": self._kind,
            "created": answer.created,
            "model": answer.model,
            "choices": [
                self._choice(asked, answer, index, choice, reasons[choice.finish_reason])
                for index, choice in enumerate(answer.choices)
            ],
            "usage": usage_body(answer.usage),
            "sluice": sluice_body(answer),
        }
        return orjson.dumps(body)

    def frames(
        self, asked: ParsedRequest, model: str | None = None, plan: Plan | None = None, cached_tokens: int = 0
    ) -> ChunkFrames:
        head: dict[str, Any] = {
            "id": self._id_prefix + asked.request.generation_id,
            "object": f"{self._kind}.chunk" if self._chat else self._kind,
            "chat": self._chat,
            "model": model or asked.request.model or "",
            "reasoning_fields": () if asked.hides_reasoning else self._reasoning_fields,
        }
        if asked.running_usage:
            return RunningUsageFrames(asked, plan, cached_tokens, **head)
        return ChunkFrames(asked, **head)

    error = staticmethod(error_json)

    def _choice(
        self, asked: ParsedRequest, answer: Answer, index: int, choice: Choice, reason: str
    ) -> ChoiceBody:
        entries = choice.logprobs
        stop = None if index else answer.stop_sequence  # known only for the first choice
        body: ChoiceBody = {"index": index, "logprobs": None, "finish_reason": reason, "stop_reason": stop}
        if not self._chat:
            body["text"] = choice.text
            body["logprobs"] = None if entries is None else completion_logprobs(entries, Offsets())
            return body
        body["logprobs"] = None if entries is None else chat_logprobs(entries)
        message: AssistantMessage = {"role": "assistant", "content": choice.text, "refusal": None}
        body["message"] = message
        if choice.tool_calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [tool_call_body(call) for call in choice.tool_calls]
        if choice.reasoning is not None and not asked.hides_reasoning:
            for field in self._reasoning_fields:
                message[field] = choice.reasoning
        return body
