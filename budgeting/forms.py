"""Where a chat template takes system messages, and how a conversation is rewritten where it takes none.

The canonical order has the system messages first and the evidence, as one more system message, right before
the latest turn. Many templates take one system message at the beginning, or none, and require user and
assistant to alternate after it; some silently omit other messages. A few small conversations are rendered
once to learn what a template takes; then::

    several system messages are not taken    they are joined into one
    a system message is not taken at all     its text is put at the start of the first user turn
    a later system message is not taken      the same with the next user turn: for the evidence, the latest

In such a turn the user's own words follow the title ``Message:``, unchanged.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import structs

from budgeting.errors import TemplateRefused
from budgeting.values import Message, Role

MESSAGE_TITLE = "Message:"

_GAP = "\n\n"
# Contents of the test conversations: a template must show each of them, in this order.
_WORDS = ("alfa", "bravo", "charlie", "delta")

Render = Callable[[Sequence[Message]], str]


@dataclass(frozen=True, slots=True)
class SystemMessageSupport:
    """Whether a template takes a ``leading`` system message, ``several``, a ``later`` one in the turns."""

    leading: bool = True
    several: bool = True
    later: bool = True

    def fold(self, messages: Sequence[Message], opening: int | None = None) -> Sequence[Message]:
        """The conversation as the template takes it; ``messages`` itself when nothing must change.

        No text is lost. A system message that no user turn follows stays a system message, at the end. The
        first ``opening`` messages are the leading system messages; default: all before the first turn.
        """
        if self.leading and self.several and self.later:
            return messages
        if opening is None:
            opening = next(
                (at for at, one in enumerate(messages) if one.role is not Role.SYSTEM), len(messages)
            )
        early = opening > (1 if self.leading else 0) and not self.several
        late = not self.later and any(one.role is Role.SYSTEM for one in messages[opening:])
        if not early and not late:
            return messages
        folded: list[Message] = []
        waiting: list[str] = []
        texts = [one.content for one in messages[:opening]]
        if not self.leading:
            waiting = texts
        elif not self.several and len(texts) > 1:
            folded = [Message(Role.SYSTEM, _GAP.join(texts))]
        else:
            folded = list(messages[:opening])
        for message in messages[opening:]:
            if message.role is Role.SYSTEM and not self.later:
                waiting.append(message.content)
            elif message.role is Role.USER and waiting:
                before = _GAP.join([*waiting, f"{MESSAGE_TITLE}\n"])
                parts = (before, *message.parts) if message.parts else ()
                folded.append(structs.replace(message, content=before + message.content, parts=parts))
                waiting = []
            else:
                folded.append(message)
        return (*folded, *(Message(Role.SYSTEM, text) for text in waiting))


def learn_system_support(render: Render) -> SystemMessageSupport:
    """Learn what a template takes; ``render`` adds no generation prompt, and may raise TemplateRefused."""
    user, answer, system = Role.USER, Role.ASSISTANT, Role.SYSTEM
    if not _shows(render, (user,)):
        return SystemMessageSupport()  # the template takes no form known here
    leading = _shows(render, (system, user))
    return SystemMessageSupport(
        leading=leading,
        several=leading and _shows(render, (system, system, user)),
        later=_shows(render, (user, answer, system, user)) or not _shows(render, (user, answer, user)),
    )


def _shows(render: Render, roles: Sequence[Role]) -> bool:
    """Whether a conversation of these roles is rendered with every text in its place."""
    words = _WORDS[: len(roles)]
    try:
        rendered = render([Message(role, word) for role, word in zip(roles, words, strict=True)])
    except TemplateRefused:
        return False
    return re.search(".*".join(words), rendered, re.DOTALL) is not None
