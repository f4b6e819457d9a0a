"""A conversation as Converse takes it.

Converse has a list of system texts, then turns that begin with the user's and alternate::

    system messages of the stable prefix    blocks of the system list, the cache point behind them
    summary, evidence, context              open the next user turn under their titles
    turns of one role in a row              one turn, a blank line between them
    an assistant's turn at the beginning    stands behind a placeholder: the turns before it were trimmed
    blank messages                          left out: models refuse them
    a partial answer                          is a last turn of the assistant, or the end of it
    white space at the end of a prefill     left out, as above
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from budgeting.forms import Form
from budgeting.sections import CONTEXT_TITLE, EVIDENCE_TITLE, SUMMARY_TITLE
from budgeting.values import Message, Role
from gateway.backends.bedrock.stops import told_to_bedrock
from gateway.backends.bedrock.values import Guardrail
from gateway.backends.port import Work
from resilience.failures import BackendFailure, FailureKind

EARLIER = "(Earlier messages are not shown.)"
CACHE_POINT = {"cachePoint": {"type": "default"}}

_GAP = "\n\n"
# System messages that change with the request: what stands from the first of them on is no stable prefix.
_VOLATILE = tuple([f"{title}\n" for title in (SUMMARY_TITLE, EVIDENCE_TITLE, CONTEXT_TITLE)])
_FORM = Form(leading=True, several=True, later=False)


@dataclass(frozen=True, slots=True)
class ConverseWriter:
    """Writes the work of one backend as parameters of ``converse`` and ``converse_stream``.

    Args:
        model_id: the model, inference profile or ARN.
        guardrail: applied to every request; ``None``: none.
        worth_caching: whether a cache point behind these system messages is taken and of use.
    """

    model_id: str
    worth_caching: Callable[[Sequence[Message]], bool]
    guardrail: Guardrail | None = None

    def request(self, work: Work) -> dict[str, Any]:
        """The parameters.

        Raises:
            BackendFailure: the conversation holds no turn that could be answered.
        """
        spoken = [message for message in work.messages if message.content.strip()]
        opening = _opening(spoken)
        system, turns = spoken[:opening], _turns(_FORM.fold(spoken, opening)[opening:])
        if turns and work.partial is not None:
            _begin(turns, work.partial.text.rstrip())
        if not turns:
            raise BackendFailure(
                FailureKind.INVALID_INPUT, "messages: a turn with some text is needed", param="messages"
            )
        sampling = work.sampling
        config = {
            "maxTokens": sampling.max_tokens,
            "temperature": None if sampling.temperature is None else min(sampling.temperature, 1.0),
            "topP": sampling.top_p,
            "stopSequences": told_to_bedrock(sampling.stop) or None,
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
                "guardrailIdentifier": self.guardrail.guardrail_id,
                "guardrailVersion": self.guardrail.version,
            }
        return request


def _opening(messages: Sequence[Message]) -> int:
    """How many messages are the stable prefix."""
    for index, message in enumerate(messages):
        if message.role is not Role.SYSTEM or message.content.startswith(_VOLATILE):
            return index
    return len(messages)


def _begin(turns: list[Message], text: str) -> None:
    """Make the model go on behind ``text``."""
    if turns[-1].role is Role.ASSISTANT:
        turns[-1] = Message(Role.ASSISTANT, turns[-1].content + text)
    elif text:
        turns.append(Message(Role.ASSISTANT, text))


def _turns(messages: Sequence[Message]) -> list[Message]:
    turns: list[Message] = []
    for message in messages:
        # Of system messages only those are left that no user turn follows.
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
