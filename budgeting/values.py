"""Values of the budget stage: a canonical prompt goes in, a plan that fits the model comes out."""

from dataclasses import dataclass
from enum import StrEnum

from msgspec import Struct


class Role(StrEnum):
    """Who speaks in a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


class PromptSection(StrEnum):
    """The parts of a prompt that have a token budget of their own."""

    SYSTEM = "system"
    RETRIEVAL = "retrieval"
    RECENT_TURNS = "recent_turns"
    OLDER_SUMMARY = "older_summary"


class Message(Struct, frozen=True):
    """One chat message as a backend will see it."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class EvidenceChunk:
    """A piece of retrieved evidence.

    ``chunk_id`` is the caller's; ``source_type`` (``catalog``, ``review``…) is shown to the model; a higher
    ``score`` is better, and ``None`` is below any score.
    """

    chunk_id: str
    source_type: str
    text: str
    score: float | None = None


class CanonicalPrompt(Struct, frozen=True):
    """A prompt in canonical order: the stable part first, volatile parts after it.

    ``system`` is the stable prefix, one entry per system message; ``turns`` are user and assistant messages,
    oldest first; ``context`` is the rendered volatile block. ``raw`` replaces all of it for text completions:
    a text, or token ids, without a chat template and never trimmed.
    """

    system: tuple[str, ...] = ()
    turns: tuple[Message, ...] = ()
    evidence: tuple[EvidenceChunk, ...] = ()
    context: str = ""
    raw: str | tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class SectionBudgets:
    """Tokens each section may use before it borrows.

    Retrieved evidence and recent turns get most of a prompt of 3,400 tokens, since an answer depends on them.
    """

    system: int = 400
    retrieval: int = 1400
    recent_turns: int = 1200
    older_summary: int = 400

    @property
    def total(self) -> int:
        """Tokens of all sections together (3,400 by default)."""
        return self.system + self.retrieval + self.recent_turns + self.older_summary


class SummaryKind(StrEnum):
    """Who summarizes the older turns that are not sent."""

    EXTRACTIVE = "extractive"
    ENGINE = "engine"
    NONE = "none"


# Retrieved evidence first: an answer needs it more than old turns.
SPARE_ORDER = (PromptSection.RETRIEVAL, PromptSection.RECENT_TURNS)


class BudgetRequest(Struct, frozen=True):
    """What the planner is asked.

    Without ``budgets`` nothing is trimmed. With them the prompt is trimmed to ``max_input_tokens`` and to the
    room next to the answer; ``spare`` are the sections that may use what others do not need, in order. The
    system part and the latest turn always may.

    The answer's room is ``max_tokens`` (the caller's), else ``reserve`` (the route's or the prompt
    version's), else the rest of the context. ``owner`` is whose written summaries may be used.
    """

    prompt: CanonicalPrompt
    max_tokens: int | None = None
    budgets: SectionBudgets | None = None
    reserve: int | None = None
    spare: tuple[PromptSection, ...] = SPARE_ORDER
    summary: SummaryKind = SummaryKind.EXTRACTIVE
    max_input_tokens: int | None = None
    owner: str = ""


class SectionCounts(Struct, frozen=True):
    """Tokens per section as sent, markup included."""

    system: int = 0
    retrieval: int = 0
    recent_turns: int = 0
    older_summary: int = 0

    @property
    def total(self) -> int:
        """The prompt's length in tokens."""
        return self.system + self.retrieval + self.recent_turns + self.older_summary


class Plan(Struct, frozen=True):
    """What is sent, exactly.

    ``token_ids`` is the whole prompt as the engine will see it; ``messages`` is the same prompt for
    backends that take messages (empty for a raw prompt). ``prefix_tokens`` is the length of the stable
    prefix: the boundary after which volatile content starts. ``generation_reserve`` is the most tokens
    that the answer may have (``open_ended``: the rest of the context, since neither the caller nor the route
    set it); ``counts.total + generation_reserve <= max_model_len`` always.

    What is missing: ``dropped_chunks`` are not sent, ``cut_chunks`` only up to a sentence's end,
    ``merged_chunks`` are sent as a duplicate of theirs. The oldest ``dropped_turns`` are not sent as they
    are; ``summarized_turns`` of them stand in the summary.
    """

    messages: tuple[Message, ...]
    token_ids: tuple[int, ...]
    counts: SectionCounts
    generation_reserve: int
    prefix_tokens: int
    dropped_chunks: tuple[str, ...] = ()
    dropped_turns: int = 0
    cut_chunks: tuple[str, ...] = ()
    merged_chunks: tuple[str, ...] = ()
    summarized_turns: int = 0
    open_ended: bool = False

    @property
    def trimmed(self) -> bool:
        """Whether anything the caller sent is missing from the prompt (a duplicate is not missing)."""
        return bool(self.dropped_chunks or self.cut_chunks) or self.dropped_turns > 0
