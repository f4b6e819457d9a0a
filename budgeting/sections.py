"""How a canonical prompt becomes messages, and to which section each message counts.

::

    system            one message each, the stable prefix
    older summary     ONE system message for the turns that are not sent, if any
    older turns       user and assistant, oldest first
    evidence          ONE system message: evidence and context, if any
    latest turn       the last user message (and what follows it)
    generation prompt

Evidence follows the older turns, so that a change of it, or of the context, changes no token before it.
"""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from budgeting.duplicates import merge_chunks
from budgeting.values import CanonicalPrompt, EvidenceChunk, Message, Role, system_message

EVIDENCE_TITLE = "Evidence:"
CONTEXT_TITLE = "Context:"
SUMMARY_TITLE = "Earlier in this conversation:"


def evidence_line(chunk: EvidenceChunk) -> str:
    """The line of the prompt for one piece of evidence: ``[catalog manga_441] <text>``."""
    return f"[{chunk.source_type} {chunk.chunk_id}] {chunk.text}"


def evidence_text(chunks: Iterable[EvidenceChunk], context: str) -> str:
    """The evidence message's text; empty when there is neither evidence nor context."""
    lines = [evidence_line(chunk) for chunk in chunks]
    parts = [EVIDENCE_TITLE, *lines] if lines else [], [CONTEXT_TITLE, context] if context else []
    return "\n\n".join("\n".join(part) for part in parts if part)


class Arrangement(Struct, frozen=True):
    """Messages in the order they are sent.

    ``cuts`` are numbers of messages: the system messages end at the first cut, the summary at the second, and
    the evidence message is between the third and the fourth; equal cuts mean that there is none.
    """

    messages: tuple[Message, ...]
    cuts: tuple[int, int, int, int]


def arrange(
    prompt: CanonicalPrompt, chunks: Sequence[EvidenceChunk], first_turn: int = 0, summary: str = ""
) -> Arrangement:
    """The prompt's messages with these chunks, the turns from ``first_turn`` on, and the ``summary``."""
    system = list(map(system_message, prompt.system))
    opening = [*system, system_message(f"{SUMMARY_TITLE}\n{summary}")] if summary else system
    latest = latest_turn(prompt.turns)
    older = prompt.turns[first_turn:latest]
    text = evidence_text(chunks, prompt.context) if chunks or prompt.context else ""
    evidence = [system_message(text)] if text else []
    start = len(opening) + len(older)
    return Arrangement(
        messages=(*opening, *older, *evidence, *prompt.turns[latest:]),
        cuts=(len(system), len(opening), start, start + len(evidence)),
    )


def prompt_messages(prompt: CanonicalPrompt) -> tuple[Message, ...]:
    """The whole prompt as messages, nothing trimmed (duplicate evidence merged)."""
    return arrange(prompt, merge_chunks(prompt.evidence).kept).messages


def latest_turn(turns: Sequence[Message]) -> int:
    """Index at which the latest turn starts: that of the last user message, else of the last message.

    A user message right after a tool's result, as in one message of Anthropic's, continues the turn.
    """
    for index in range(len(turns) - 1, -1, -1):
        if turns[index].role is Role.USER and not (index and turns[index - 1].role is Role.TOOL):
            return index
    return max(0, len(turns) - 1)


def exchanges(turns: Sequence[Message]) -> list[int]:
    """Indexes at which the older exchanges (a user message with its answers) start, oldest first.

    Answers before any user message are an exchange of their own; a tool's result is in the exchange of its
    call. The latest turn is not included.
    """
    latest = latest_turn(turns)
    called = {call.id for turn in turns for call in turn.tool_calls}
    unanswered: set[str] = set()  # calls whose results were found, going backwards
    starts: list[int] = []
    for index in range(len(turns) - 1, -1, -1):
        turn = turns[index]
        if turn.tool_call_id in called:
            unanswered.add(turn.tool_call_id)
        unanswered.difference_update([call.id for call in turn.tool_calls])
        if index < latest and (index == 0 or (turn.role is Role.USER and not unanswered)):
            starts.append(index)
    return starts[::-1]
