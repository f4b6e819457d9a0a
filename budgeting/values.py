"""Values of the budget stage: a canonical prompt goes in, a plan that fits the model comes out."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from types import MappingProxyType

from msgspec import Struct
from msgspec.structs import replace

from budgeting.token_ids import TokenIds


class Role(StrEnum):
    """The author of a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class PromptSection(StrEnum):
    """The parts of a prompt that are counted apart; tools have no budget, since they are never cut."""

    TOOLS = "tools"
    SYSTEM = "system"
    RETRIEVAL = "retrieval"
    RECENT_TURNS = "recent_turns"
    OLDER_SUMMARY = "older_summary"


class ToolKind(StrEnum):
    """What a tool takes: arguments in JSON, or free text."""

    FUNCTION = "function"
    CUSTOM = "custom"


class Tool(Struct, frozen=True):
    """A tool that the model may call.

    ``parameters`` is the JSON schema of a function's arguments, ``format`` what the text of a custom tool
    must look like; both are canonical JSON text, so that equal tools are equal values.
    """

    name: str
    kind: ToolKind = ToolKind.FUNCTION
    description: str | None = None
    parameters: str | None = None
    strict: bool | None = None
    format: str | None = None

    @property
    def has_grammar(self) -> bool:
        """Whether the input of a custom tool is not any text."""
        return self.format not in (None, '{"type":"text"}')


class ToolCall(Struct, frozen=True):
    """A call of a tool; ``arguments`` is the text as generated: JSON, or a custom tool's input."""

    id: str
    name: str
    arguments: str
    kind: ToolKind = ToolKind.FUNCTION


class ToolChoiceMode(StrEnum):
    """Whether the model calls a tool."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


class ToolChoice(Struct, frozen=True):
    """Which tools the model may or must call.

    ``name`` is the tool that must be called (mode ``named``). With ``allowed`` only the tools of these names
    may be called; empty: all.
    """

    mode: ToolChoiceMode = ToolChoiceMode.AUTO
    name: str | None = None
    allowed: tuple[str, ...] = ()

    @property
    def forces_call(self) -> bool:
        return self.mode in (ToolChoiceMode.REQUIRED, ToolChoiceMode.NAMED)


class ImageContent(Struct, frozen=True, tag="image"):
    """An image in a message.

    ``url`` is an address or a ``data:`` URL, and ``param`` its field of the body; both are empty once the
    image was read. From then on ``sha256`` is the hash of its bytes; ``width`` and ``height`` are in pixels.
    """

    url: str = ""
    detail: str | None = None
    param: str = ""
    width: int = 0
    height: int = 0
    sha256: str = ""

    def __repr__(self) -> str:
        return f"ImageContent({self.width}x{self.height}, {self.detail}, sha256={self.sha256!r})"


class AudioContent(Struct, frozen=True, tag="audio"):
    """A recording in a message, in base64."""

    data: str
    format: str


class Message(Struct, frozen=True, gc=False):
    """One chat message as a backend will see it.

    ``content`` is its text; empty if the caller sent null. ``parts`` is the whole content in order, if it is
    not text alone. ``tool_call_id`` is the call that a message of the role ``tool`` answers.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    parts: tuple[str | ImageContent | AudioContent, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether the message has only a role and a text."""
        return not (self.tool_calls or self.tool_call_id or self.name or self.reasoning or self.parts)

    @property
    def without_parts(self) -> "Message":
        return replace(self, parts=())

    @property
    def images(self) -> tuple[ImageContent, ...]:
        return tuple([part for part in self.parts if isinstance(part, ImageContent)])

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts of the message that a chat template may show."""
        if self.plain:
            return (self.content,)
        called = [text for call in self.tool_calls for text in (call.id, call.name, call.arguments)]
        labels = [text for text in (self.tool_call_id, self.name, self.reasoning) if text]
        return (self.content, *called, *labels)


system_message = partial(Message, Role.SYSTEM)


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


NO_KWARGS: Mapping[str, object] = MappingProxyType({})


class CanonicalPrompt(Struct, frozen=True):
    """A prompt in canonical order: the stable part first, volatile parts after it.

    ``tools`` are part of the stable prefix, in the caller's order; ``template_kwargs`` are the variables that
    the caller sets for the chat template.

    ``system`` is the stable prefix, one entry per system message; ``turns`` are the other messages,
    oldest first; ``context`` is the rendered volatile block. ``raw`` replaces all of it for text completions:
    a text, or token ids, without a chat template and never trimmed.
    """

    system: tuple[str, ...] = ()
    turns: tuple[Message, ...] = ()
    evidence: tuple[EvidenceChunk, ...] = ()
    context: str = ""
    raw: str | tuple[int, ...] | None = None
    tools: tuple[Tool, ...] = ()
    template_kwargs: Mapping[str, object] = NO_KWARGS


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
    """The input of the planner.

    Without ``budgets`` nothing is trimmed. With them the prompt is trimmed to ``max_input_tokens`` and to the
    room next to the answer; ``spare`` are the sections that may use what others do not need, in order. The
    system part and the latest turn always may.

    The answer's room is ``max_tokens`` (the caller's), else ``reserve`` (the route's or the prompt
    version's), else the rest of the context. Only the summaries written for ``owner`` may be used.

    ``trims``: a model's own budgets may trim the prompt if there are no others.

    ``lenient``: ``max_tokens`` is an upper bound, and the answer has fewer if the context has less room; an
    effort that the chat template refuses becomes the nearest one that it takes.
    """

    prompt: CanonicalPrompt
    max_tokens: int | None = None
    budgets: SectionBudgets | None = None
    reserve: int | None = None
    spare: tuple[PromptSection, ...] = SPARE_ORDER
    summary: SummaryKind = SummaryKind.EXTRACTIVE
    max_input_tokens: int | None = None
    owner: str = ""
    lenient: bool = False
    trims: bool = False


class SectionCounts(Struct, frozen=True):
    """Tokens per section as sent, markup included."""

    system: int = 0
    retrieval: int = 0
    recent_turns: int = 0
    older_summary: int = 0
    tools: int = 0

    @property
    def total(self) -> int:
        """The prompt's length in tokens."""
        return self.system + self.retrieval + self.recent_turns + self.older_summary + self.tools


class Plan(Struct, frozen=True):
    """The exact prompt that is sent, and what was left out.

    ``token_ids`` is the whole prompt as the engine will see it; ``messages``, with ``tools``, is the
    same prompt for backends that take messages (empty for a raw prompt). Images are in the messages
    alone, and ``counts`` has their ``image_tokens`` too.
    ``prefix_tokens`` is the length of the stable prefix: the boundary after which volatile content starts.
    ``generation_reserve`` is the most tokens that the answer may have (``open_ended``: the rest of the
    context, since neither the caller nor the route set it); ``counts.total + generation_reserve <=
    max_model_len`` always. ``reasoning_effort`` is set if it differs from the caller's.

    Left out: ``dropped_chunks`` are not sent, ``cut_chunks`` only up to the end of a sentence, and for each
    of ``merged_chunks`` a duplicate is sent. The oldest ``dropped_turns`` are not sent; the summary contains
    ``summarized_turns`` of them.
    """

    messages: tuple[Message, ...]
    token_ids: TokenIds
    counts: SectionCounts
    generation_reserve: int
    prefix_tokens: int
    dropped_chunks: tuple[str, ...] = ()
    dropped_turns: int = 0
    cut_chunks: tuple[str, ...] = ()
    merged_chunks: tuple[str, ...] = ()
    summarized_turns: int = 0
    open_ended: bool = False
    tools: tuple[Tool, ...] = ()
    reasoning_effort: str | None = None
    image_tokens: int = 0
