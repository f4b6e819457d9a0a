"""Canonical prompts: stable parts come first and volatile parts last, in whatever order the caller sent them.

The stable prefix (the prompt version's text, then the caller's system messages) is normalised, so that texts
of equal meaning have equal bytes and an engine's prefix cache can reuse them. User and assistant turns are
never changed. The context (time, names, anything volatile) goes after the older turns; so do, with the
policy ``move``, the sentences of the caller's system messages that change from request to request. A prompt
version's own text is not searched: it is published and does not change.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from sys import getsizeof

from msgspec import Struct

from budgeting.normal_forms import normalized
from budgeting.plan import Offload
from budgeting.token_cache import TokenCache
from budgeting.values import NO_KWARGS, CanonicalPrompt, EvidenceChunk, Message, Role, Tool
from gateway.config.volatile import VolatilePolicy
from gateway.contracts.values import EMPTY, NATIVE, GenerateRequest
from gateway.errors import InvalidRequest
from gateway.prompts.versions import PromptVersion
from gateway.prompts.volatile import Separated, VolatileFinder, VolatileFinding

# The most system text that is made canonical on the event loop: at worst about 1.5 µs per character, some
# milliseconds; a usual text, most of which is cached, takes a twentieth of that.
INLINE_SYSTEM_CHARS = 4_096

# A module constant, because the lookup of an enum member costs as much as a function call.
SYSTEM = Role.SYSTEM
# The system messages, and all other messages (the turns).
_Roles = tuple[Sequence[Message], Sequence[Message]]

# Bound of the cache of system texts. An agent's have 10 to 50 KB, most with a date, and recur all day.
CACHE_BYTES = 16 * 1024 * 1024

# Unicode line ends that the JSON encoder does not escape; they occur only inside strings.
_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


class Canonical(Struct, frozen=True):
    """A canonical prompt, and the volatile content found in the caller's system messages.

    ``policy`` is what was done with ``findings``: moved after the stable prefix, or left in place.
    """

    prompt: CanonicalPrompt
    policy: VolatilePolicy = VolatilePolicy.OFF
    findings: tuple[VolatileFinding, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of the findings, sorted, each once; safe to log."""
        return tuple(sorted({finding.kind.value for finding in self.findings}))

    @property
    def moved(self) -> bool:
        """Whether sentences of the caller's system messages were moved out of the stable prefix."""
        return bool(self.findings) and self.policy is VolatilePolicy.MOVE

    @property
    def action(self) -> str:
        """What was done with the findings: ``moved`` or ``reported``."""
        return "moved" if self.moved else "reported"


class Canonicalizer:
    """Makes requests' prompts canonical by the volatile policy of the prompt version or of the contract.

    By default no sentence of a prompt in OpenAI's contract is moved. Thread-safe. System texts are cached.
    """

    def __init__(
        self,
        *,
        native: VolatilePolicy = VolatilePolicy.MOVE,
        openai: VolatilePolicy = VolatilePolicy.REPORT,
    ) -> None:
        self._native = native
        self._openai = openai
        self._finder = VolatileFinder()
        self._known: TokenCache[tuple[str, Separated]] = TokenCache(CACHE_BYTES)

    def canonical(
        self, request: GenerateRequest, version: PromptVersion | None, roles: _Roles | None = None
    ) -> Canonical:
        """Return a request's canonical prompt; a text completion's prompt is sent alone and unchanged.

        The text of ``version`` comes first, as one system message. Moved sentences follow the fields of the
        context, one per line, in their order and verbatim. Idempotent for the caller's system messages and
        turns. ``roles`` are the request's messages, split. Raises InvalidRequest for a context that is not
        JSON.
        """
        if request.raw_prompt is not None:
            return Canonical(CanonicalPrompt(raw=request.raw_prompt))
        policy = self._native if request.contract is NATIVE else self._openai
        if version is not None and version.volatile is not None:
            policy = version.volatile
        return self._canonical(
            roles or _split_roles(request.messages),
            policy,
            version,
            request.context,
            request.chunks,
            request.tools,
            request.template_kwargs if request.reasoning_effort is None else request.template_variables,
        )

    def messages(self, messages: Sequence[Message]) -> Canonical:
        """Return the canonical form of messages in OpenAI's contract, without prompt version and context."""
        return self._canonical(_split_roles(messages), self._openai)

    async def canonical_async(
        self, request: GenerateRequest, version: PromptVersion | None, offload: Offload = asyncio.to_thread
    ) -> Canonical:
        """Call :meth:`canonical`, offloaded if it would block the event loop."""
        roles = _split_roles(request.messages)
        system, known = roles[0], self._known.get
        size = sum([len(message.content) for message in system])
        if size > INLINE_SYSTEM_CHARS:
            size -= sum([len(one.content) for at, one in enumerate(system) if known((one.content, at))])
        if size <= INLINE_SYSTEM_CHARS:
            return self.canonical(request, version, roles)
        return await offload(lambda: self.canonical(request, version, roles))

    def _canonical(
        self,
        roles: _Roles,
        volatile: VolatilePolicy,
        version: PromptVersion | None = None,
        context: Mapping[str, object] = EMPTY,
        evidence: tuple[EvidenceChunk, ...] = (),
        tools: tuple[Tool, ...] = (),
        template_kwargs: Mapping[str, object] = NO_KWARGS,
    ) -> Canonical:
        system = [stable_text(version)] if version is not None else []
        findings: list[VolatileFinding] = []
        volatile_lines = [render_context(context)] if context else []
        written, turns = roles
        for number, message in enumerate(written):
            text, separated = self._read(message.content, number, volatile)
            findings += separated.findings
            if volatile is VolatilePolicy.MOVE and separated.findings:
                system.append(separated.stable)
                volatile_lines += separated.moved
            else:
                system.append(text)
        prompt = CanonicalPrompt(
            system=tuple(filter(None, system)),
            turns=tuple(turns),
            evidence=evidence,
            context="\n".join(volatile_lines),
            tools=tools,
            template_kwargs=template_kwargs,
        )
        return Canonical(prompt, volatile, tuple(findings))

    def _read(self, content: str, number: int, volatile: VolatilePolicy) -> tuple[str, Separated]:
        """Return system message ``number`` of the caller normalized, and separated from volatile content."""
        if volatile is VolatilePolicy.OFF:
            return (text := normalize(content)), Separated(text)
        key = content, number
        read = self._known.get(key)
        if read is None:
            text = normalize(content)
            separated = self._finder.separate(text, number)
            read = text, separated
            found = [one.text + one.sentence for one in separated.findings]
            self._known.put(key, read, sum(map(getsizeof, (content, text, separated.stable, *found))))
        return read


def _split_roles(messages: Sequence[Message]) -> _Roles:
    system: list[Message] = []  # list[Message]() would take ten times as long
    turns: list[Message] = []
    for message in messages:
        (system if message.role is SYSTEM else turns).append(message)
    return system, turns


def stable_text(version: PromptVersion) -> str:
    """Return a version's system text, policy and grounding rule as one text, separated by blank lines."""
    parts = (normalize(part) for part in (version.system, version.policy, version.grounding_rule))
    return "\n\n".join(part for part in parts if part)


def normalize(text: str) -> str:
    """Return a system text in composed Unicode (NFC), with line feeds, without trailing spaces of lines and
    without blank lines around the text; idempotent."""
    composed = normalized("NFC", text).replace("\r\n", "\n").replace("\r", "\n")
    return "\n".join(line.rstrip() for line in composed.split("\n")).strip()


def render_context(context: Mapping[str, object]) -> str:
    """Return the context as text: a line ``key: value`` for each field, sorted by key.

    A text of one plain line is used unchanged. Any other value is written as JSON with sorted keys, so that
    no value can look like another field. Raises InvalidRequest for a value that is not JSON or too deep.
    """
    try:
        return "\n".join(f"{_inline(key)}: {_inline(context[key])}" for key in sorted(context))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            "context holds a value that cannot be written as JSON; allowed: texts, numbers, booleans, null, "
            "lists and objects of these, nested up to a few hundred deep",
            param="context",
        ) from error


def _inline(value: object) -> str:
    if isinstance(value, str) and value.splitlines() == [value] and value.strip() == value:
        return value
    text = json.dumps(
        value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_plain
    )
    return text.translate(_LINE_ENDS)


def _plain(value: object) -> object:
    """Convert a frozen mapping to a dict for the JSON encoder. Raises TypeError for other types."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
