"""A conversation in Converse's form: a list of system texts, then alternating turns, the user's first::

system messages of the stable prefix    blocks of the system list, the cache point after them
summary, evidence, context              start the next user turn, under their titles
turns of one role in a row              one turn, with a blank line between their texts
images                                  blocks with their bytes, between the texts around them
calls of tools                          blocks of the assistant's turn, after its text
results of tools                        blocks of one user turn, in the order of the calls
an assistant's turn at the start        preceded by a placeholder: the turns before it were trimmed
blank messages and texts                omitted: models refuse them
reasoning of earlier answers            omitted: models take it with their own signature alone
a partial answer                        the last turn of the assistant, or the end of it
white space at the end of a prefill     omitted: models refuse it
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from budgeting.forms import SystemMessageSupport
from budgeting.sections import CONTEXT_TITLE, EVIDENCE_TITLE, SUMMARY_TITLE
from budgeting.values import ImageContent, Message, Role
from gateway.backends.bedrock.answer import stops_for_bedrock
from gateway.backends.bedrock.models import is_claude, takes_schemas
from gateway.backends.bedrock.tools import ConverseTools, closed, tools_as_messages
from gateway.backends.port import Work
from gateway.config.backends import BedrockGuardrail
from gateway.contracts.images import ImageData
from gateway.contracts.values import FormatType, ResponseFormat
from resilience.failures import invalid_input

EARLIER = "(Earlier messages are not shown.)"
NO_OUTPUT = "(no output)"  # the text of a tool's result without content: models refuse an empty one
CACHE_POINT = {"cachePoint": {"type": "default"}}

_GAP = "\n\n"
# Beginnings of system messages that change with the request: the first one ends the stable prefix.
_VOLATILE = tuple([f"{title}\n" for title in (SUMMARY_TITLE, EVIDENCE_TITLE, CONTEXT_TITLE)])
_FORM = SystemMessageSupport(leading=True, several=True, later=False)


@dataclass(frozen=True, slots=True)
class ConverseWriter:
    """Writes the work of one backend as parameters of ``converse`` and ``converse_stream``.

    Args:
        worth_caching: whether a cache point after these system messages is accepted and useful.
        guardrail: applied to every request.
    """

    model_id: str
    worth_caching: Callable[[Sequence[Message]], bool]
    guardrail: BedrockGuardrail | None = None

    def request(self, work: Work, tools: ConverseTools) -> dict[str, Any]:
        """The parameters. Raises BackendFailure for a conversation or a format that Converse cannot have."""
        spoken = [
            one
            for one in work.messages
            if one.content.strip() or one.tool_calls or one.tool_call_id or one.parts
        ]
        opening = _opening(spoken)
        system, turns = spoken[:opening], _turns(_FORM.fold(spoken, opening)[opening:], tools, work.images)
        if turns and work.partial is not None:
            _append_partial(turns, work.partial.text.rstrip())
        if not turns:
            raise invalid_input("messages: a turn with some text is needed", "messages")
        sampling, stops = work.sampling, stops_for_bedrock(work.sampling.stop)
        config = {
            "maxTokens": None if work.open_ended else sampling.max_tokens,
            "temperature": None if sampling.temperature is None else min(sampling.temperature, 1.0),
            "topP": sampling.top_p,
            "stopSequences": stops or None,
        }
        request: dict[str, Any] = {
            "modelId": self.model_id,
            "messages": turns,
            "inferenceConfig": {name: value for name, value in config.items() if value is not None},
        }
        cached = tools_as_messages(work) if is_claude(self.model_id) else ()
        if (tool_config := tools.config(strict=takes_schemas(self.model_id))) is not None:
            request["toolConfig"] = tool_config
            if cached and self.worth_caching(cached):
                tool_config["tools"].append(CACHE_POINT)
        if system:
            request["system"] = [{"text": one.content} for one in system]
            if self.worth_caching((*cached, *system)):
                request["system"].append(CACHE_POINT)
        if is_claude(self.model_id) and len(stops) > 1:
            request["additionalModelResponseFieldPaths"] = ["/stop_sequence"]
        if work.response_format.type is not FormatType.TEXT:
            request["outputConfig"] = self._output_config(work.response_format)
        if self.guardrail is not None:
            request["guardrailConfig"] = {
                "guardrailIdentifier": self.guardrail.id,
                "guardrailVersion": self.guardrail.version,
            }
        return request

    def _output_config(self, asked: ResponseFormat) -> dict[str, Any]:
        structured = takes_schemas(self.model_id)
        if asked.type is not FormatType.JSON_SCHEMA or not structured:
            raise invalid_input(
                f"{self.model_id} on Bedrock cannot be asked for {asked.type.value}"
                + ("; allowed: json_schema" if structured else ""),
                "response_format",
            )
        schema = orjson.dumps(closed(orjson.loads(asked.spec))).decode()
        return {"textFormat": {"type": "json_schema", "structure": {"jsonSchema": {"schema": schema}}}}


def _opening(messages: Sequence[Message]) -> int:
    """The number of messages in the stable prefix."""
    for index, message in enumerate(messages):
        if message.role is not Role.SYSTEM or message.content.startswith(_VOLATILE):
            return index
    return len(messages)


def _append_partial(turns: list[dict[str, Any]], text: str) -> None:
    if turns[-1]["role"] == Role.ASSISTANT:
        turns[-1]["content"][-1]["text"] += text
    elif text:
        turns.append({"role": Role.ASSISTANT.value, "content": [{"text": text}]})


def _turns(
    messages: Sequence[Message], tools: ConverseTools, images: Mapping[str, ImageData]
) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    if messages and messages[0].role is Role.ASSISTANT:
        _add(turns, Role.USER, {"text": EARLIER})
    open_calls: dict[str, tuple[str, Message | None]] = {}  # by the caller's id: the id sent, the result
    for message in messages:
        if message.role is Role.TOOL:
            sent_id, earlier = open_calls.get(message.tool_call_id or "", ("", None))
            if not sent_id or earlier is not None:
                raise invalid_input(
                    f"messages: the result of the call {message.tool_call_id!r} does not follow that call; "
                    "allowed: one result for each call of the assistant's message before",
                    "messages",
                )
            open_calls[message.tool_call_id or ""] = (sent_id, message)
            continue
        _add(turns, Role.USER, *_results(open_calls, images))
        # A system message that is left at this point has no user turn after it.
        role = Role.ASSISTANT if message.role is Role.ASSISTANT else Role.USER
        _add(turns, role, *_blocks(message, images))
        open_calls = {call.id: (tools.call_id(call.id), None) for call in message.tool_calls}
        if len(open_calls) < len(message.tool_calls):
            raise invalid_input(
                "messages: two calls of one message have the same id; allowed: an id for each call",
                "messages",
            )
        _add(turns, role, *[tools.call(call, open_calls[call.id][0]) for call in message.tool_calls])
    _add(turns, Role.USER, *_results(open_calls, images))
    if turns and turns[-1]["role"] == Role.ASSISTANT:
        last = turns[-1]["content"][-1]
        last["text"] = last["text"].rstrip()
    return turns


def _blocks(message: Message, images: Mapping[str, ImageData]) -> list[dict[str, Any]]:
    """The message's texts and images in their order; texts in a row are one block."""
    blocks: list[dict[str, Any]] = []
    parts = message.parts or (message.content,)
    for is_text, group in itertools.groupby(parts, lambda part: isinstance(part, str)):
        if is_text:
            text = "".join([part for part in group if isinstance(part, str)])
            blocks += [{"text": text}] if text.strip() else []
        else:
            shown = [images[part.sha256] for part in group if isinstance(part, ImageContent)]
            blocks += [_image_block(image) for image in shown]
    return blocks


def _image_block(image: ImageData) -> dict[str, Any]:
    form = image.media_type.removeprefix("image/")
    return {"image": {"format": form, "source": {"bytes": image.decoded()}}}


def _results(
    calls: Mapping[str, tuple[str, Message | None]], images: Mapping[str, ImageData]
) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    for call_id, (sent_id, message) in calls.items():
        if message is None:
            raise invalid_input(
                f"messages: the call {call_id!r} has no result; allowed: a result for each call", "messages"
            )
        content = _blocks(message, images) or [{"text": NO_OUTPUT}]
        blocks.append({"toolResult": {"toolUseId": sent_id, "content": content}})
    return blocks


def _add(turns: list[dict[str, Any]], role: Role, *blocks: dict[str, Any]) -> None:
    for block in blocks:
        if not turns or turns[-1]["role"] != role:
            turns.append({"role": role.value, "content": [block]})
        elif "text" in block and "text" in turns[-1]["content"][-1]:
            # Popped, so that it has no other reference: then += copies the new part alone.
            text = turns[-1]["content"][-1].pop("text")
            text += _GAP + block["text"]
            turns[-1]["content"][-1]["text"] = text
        else:
            turns[-1]["content"].append(block)
