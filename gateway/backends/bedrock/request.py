"""A conversation in Converse's form: a list of system texts, then alternating turns, the user's first::

system messages of the stable prefix    blocks of the system list, the cache point after them
summary, evidence, context              start the next user turn, under their titles
turns of one role in a row              one turn, with a blank line between them
an assistant's turn at the start        preceded by a placeholder: the turns before it were trimmed
blank messages                          omitted: models refuse them
a partial answer                        the last turn of the assistant, or the end of it
white space at the end of a prefill     omitted, as above
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from budgeting.forms import Form
from budgeting.sections import CONTEXT_TITLE, EVIDENCE_TITLE, SUMMARY_TITLE
from budgeting.values import Message, Role
from gateway.backends.bedrock.answer import stops_for_bedrock
from gateway.backends.port import Work
from gateway.config.backends import BedrockGuardrail
from resilience.failures import BackendFailure, FailureKind

EARLIER = "(Earlier messages are not shown.)"
CACHE_POINT = {"cachePoint": {"type": "default"}}

_GAP = "\n\n"
# System messages that change with the request: the first of them ends the stable prefix.
_VOLATILE = tuple([f"{title}\n" for title in (SUMMARY_TITLE, EVIDENCE_TITLE, CONTEXT_TITLE)])
_FORM = Form(leading=True, several=True, later=False)


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

    def request(self, work: Work) -> dict[str, Any]:
        """The parameters. Raises BackendFailure when the conversation has no turn to answer."""
        spoken = [message for message in work.messages if message.content.strip()]
        opening = _opening(spoken)
        system, turns = spoken[:opening], _turns(_FORM.fold(spoken, opening)[opening:])
        if turns and work.partial is not None:
            _append_partial(turns, work.partial.text.rstrip())
        if not turns:
            raise BackendFailure(
                FailureKind.INVALID_INPUT, "messages: a turn with some text is needed", param="messages"
            )
        sampling = work.sampling
        config = {
            "maxTokens": None if work.open_ended else sampling.max_tokens,
            "temperature": None if sampling.temperature is None else min(sampling.temperature, 1.0),
            "topP": sampling.top_p,
            "stopSequences": stops_for_bedrock(sampling.stop) or None,
        }
        request: dict[str, Any] = {
            "modelId": self.model_id,
            "messages": [{"role": one.role.value, "content": [{"text": one.content}]} for one in turns],
            "inferenceConfig": {name: value for name, value in config.items() if value is not None},
        }
        if system:
            request["system"] = [{"text": one.content} for one in system]
            if self.worth_caching(system):
                request["system"].append(CACHE_POINT)
        if self.guardrail is not None:
            request["guardrailConfig"] = {
                "guardrailIdentifier": self.guardrail.id,
                "guardrailVersion": self.guardrail.version,
            }
        return request


def _opening(messages: Sequence[Message]) -> int:
    """The number of messages in the stable prefix."""
    for index, message in enumerate(messages):
        if message.role is not Role.SYSTEM or message.content.startswith(_VOLATILE):
            return index
    return len(messages)


def _append_partial(turns: list[Message], text: str) -> None:
    if turns[-1].role is Role.ASSISTANT:
        turns[-1] = Message(Role.ASSISTANT, turns[-1].content + text)
    elif text:
        turns.append(Message(Role.ASSISTANT, text))


def _turns(messages: Sequence[Message]) -> list[Message]:
    turns: list[Message] = []
    for message in messages:
        # System messages that are left here have no user turn after them.
        role = Role.ASSISTANT if message.role is Role.ASSISTANT else Role.USER
        if turns and turns[-1].role is role:
            turns[-1] = Message(role, f"{turns[-1].content}{_GAP}{message.content}")
        else:
            turns.append(Message(role, message.content))
    if turns and turns[0].role is Role.ASSISTANT:
        turns.insert(0, Message(Role.USER, EARLIER))
    if turns and turns[-1].role is Role.ASSISTANT:
        turns[-1] = Message(Role.ASSISTANT, turns[-1].content.rstrip())
    return turns
