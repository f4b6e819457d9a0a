"""Random legal answers as events, with a simple fold of each to compare with."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import strategies as st

from budgeting.values import ToolCall
from gateway.contracts.events import AnswerFold, Delta, Reasoning, ToolArgs, ToolBegin, ToolEnd
from gateway.contracts.values import FinishReason

TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12)
NAMES = st.from_regex(r"[a-z_]{1,12}", fullmatch=True)
VALUES = st.dictionaries(st.text("abc", max_size=3), st.integers() | TEXT | st.booleans(), max_size=3)


@dataclass(frozen=True)
class EventSequence:
    """One legal answer; ``reasons`` has the finish reason of each choice."""

    events: tuple[Delta, ...]
    reasons: tuple[FinishReason, ...]

    def text(self, index: int = 0) -> str:
        return "".join(one.text for one in self.events if type(one) is Delta and one.index == index)

    def reasoning(self, index: int = 0) -> str | None:
        pieces = [one.text for one in self.events if isinstance(one, Reasoning) and one.index == index]
        return "".join(pieces) or None

    def tool_calls(self, index: int = 0) -> tuple[ToolCall, ...]:
        mine = [one for one in self.events if one.index == index]
        return tuple(
            ToolCall(
                begin.id,
                begin.text,
                "".join(one.text for one in mine if isinstance(one, ToolArgs) and one.call == begin.call),
            )
            for begin in mine
            if isinstance(begin, ToolBegin)
        )

    def in_order(self) -> tuple[Delta, ...]:
        """What a whole answer has of the first choice's order."""
        fold = AnswerFold(len(self.reasons))
        for one in self.events:
            fold.take(one)
        return fold.in_order()


@st.composite
def answers(draw: st.DrawFn, max_choices: int = 2) -> EventSequence:
    """Draw any legal answer with whole tool calls; the events of its choices are interleaved."""
    n = draw(st.integers(1, max_choices))
    lanes = [draw(_choice(index)) for index in range(n)]
    reasons = tuple(
        FinishReason.TOOL_CALLS
        if any(isinstance(one, ToolBegin) for one in lane)
        else draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
        for lane in lanes
    )
    mixed: list[Delta] = []
    while any(lanes):
        lane = draw(st.sampled_from([lane for lane in lanes if lane]))
        mixed.append(lane.pop(0))
    return EventSequence(tuple(mixed), reasons)


@st.composite
def _choice(draw: st.DrawFn, index: int) -> list[Delta]:
    events: list[Delta] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["text", "reasoning", "call"]), min_size=1, max_size=5)):
        if kind == "text":
            events.append(Delta(draw(TEXT), 1, index=index))
        elif kind == "reasoning":
            events.append(Reasoning(draw(TEXT), 1, index=index))
        else:
            name, arguments = draw(NAMES), json.dumps(draw(VALUES))
            identity = f"call_{index}_{calls}"
            events.append(ToolBegin(name, 1, index=index, call=calls, id=identity))
            cuts = sorted(draw(st.sets(st.integers(1, len(arguments) - 1), max_size=4)))
            events.extend(ToolArgs(piece, 1, index=index, call=calls) for piece in _pieces(arguments, cuts))
            events.append(ToolEnd("", 0, index=index, call=calls))
            calls += 1
    return events


def _pieces(text: str, cuts: list[int]) -> Iterator[str]:
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        yield text[start:end]
