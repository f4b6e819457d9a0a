"""The features of each dialect of OpenAI's API, and request bodies in it."""

import hashlib
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final

import orjson
from msgspec import Struct

from adapters.values import Adapter
from budgeting.token_ids import PerPiece
from gateway.backends.partial_answer import rest_of, resumed_seed
from gateway.backends.port import Continue, Work
from gateway.backends.tool_bodies import message_body, parts_of_body, tool_fields
from gateway.backends.workers.client import Upload
from gateway.backends.workers.header_template import HeaderTemplate
from gateway.backends.workers.loras import loaded_name
from gateway.config.backends import OpenAIBackend
from gateway.contracts.features import KNOWN_FEATURES, TOOL_FEATURES, Feature
from gateway.contracts.fields import MAX_DEADLINE_MS
from gateway.contracts.front_headers import front_headers
from gateway.contracts.images import ImageData
from gateway.contracts.values import TEXT, FormatType

# Tokens in each chunk after the first one when the caller does not stream. The cost of a chunk does not
# depend on its length, and an answer that a deadline cuts short loses at most so many tokens. With tools a
# chunk has one: several of vLLM's parsers misread calls in longer ones (``xlam``, ``deepseek_v31``).
STREAM_INTERVAL = 32
# Longest prompt, in tokens, for which the answer's token ids are requested: vLLM then repeats the prompt's
# ids in its first chunk, up to 8 bytes each, and an event is at most 1 MiB (``sse``).
MAX_ECHOED_PROMPT = 65_536
# Most log-probabilities of an echoed prompt: prompt tokens * (logprobs + 1). vLLM sends them in one event,
# 50 to 120 bytes for each, and the gateway parses them in one call.
MAX_ECHOED_LOGPROBS = 32_768
MAX_ECHO_BYTES = 8 * 1024 * 1024
# The salt sent to another Sluice when the pool's tenants share prefixes; never equal to a hash.
SHARED_SALT = "shared"
# Tenants whose salts are cached.
MAX_SALTS = 1_024
CHAT_PATH, TEXT_PATH = "/chat/completions", "/completions"


class Dialect(StrEnum):
    """Which extensions of OpenAI's contract the workers support."""

    VLLM = "vllm"
    SLUICE = "sluice"
    OPENAI = "openai"


VLLM, SLUICE, OPENAI = Dialect  # as constants, as in ``gateway.contracts.values``
_PLAIN = frozenset(
    {
        Feature.TEMPERATURE,
        Feature.TEMPERATURE_ABOVE_1,
        Feature.TOP_P,
        Feature.SEED,
        Feature.STOP,
        Feature.N,
        Feature.PRESENCE_PENALTY,
        Feature.FREQUENCY_PENALTY,
        Feature.LOGIT_BIAS,
        Feature.LOGPROBS,
        Feature.RESPONSE_FORMAT,
        Feature.RAW_PROMPT,
        Feature.REASONING_EFFORT,
    }
)
FEATURES: Mapping[Dialect, frozenset[Feature]] = {
    VLLM: KNOWN_FEATURES | TOOL_FEATURES | {Feature.ECHO, Feature.IMAGES},
    SLUICE: KNOWN_FEATURES | TOOL_FEATURES | {Feature.IMAGES},
    OPENAI: _PLAIN | TOOL_FEATURES | {Feature.IMAGES},
}

# Formats of OpenAI's contract; the other dialects take the other formats in vLLM's field.
_OPENAI_FORMATS = frozenset({FormatType.JSON_OBJECT, FormatType.JSON_SCHEMA})
_NEUTRAL = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "ignore_eos": False,
    "echo": False,
}
_NEUTRAL_VALUES, _neutral_values = tuple(_NEUTRAL.values()), attrgetter(*_NEUTRAL)


class WrittenRequest(Struct, frozen=True):
    """A request as it is sent to a worker.

    ``running_counts``: its chunks report the tokens so far, which is needed if one may have several tokens,
    or the prompt's. ``custom_tools``: the worker knows tools of type ``custom`` and allowed tools; vLLM knows
    functions alone.
    """

    path: str
    headers: bytes
    body: bytes | Upload
    running_counts: bool
    custom_tools: bool


@dataclass(frozen=True, slots=True)
class CompletionWriter:
    """Writes the work of one backend as request bodies.

    Args:
        model: the base model's name at the workers.
        dialect: whose extensions may be used.
        token_ids: send prompts as token ids to ``/completions`` instead of messages.
        templates: further headers, with fields of the request.
        knows_vocabulary: whether the gateway knows which bytes a token id stands for.
        completes: whether workers of dialect vllm complete a last message of the assistant.
    """

    model: str
    section: OpenAIBackend
    dialect: Dialect
    token_ids: bool
    templates: tuple[HeaderTemplate, ...] = ()
    knows_vocabulary: bool = True
    completes: bool = True

    def cache_salt(self, work: Work) -> str | None:
        """The salt of the request: only requests of one salt share cached prefixes; ``None``: all do."""
        return None if self.section.share_prefix_across_tenants else work.cache_salt

    def headers(self, work: Work) -> bytes:
        """The operator's header lines; for another Sluice also those with tenant, organization and salt."""
        lines = b"".join([template.line(work) for template in self.templates]) if self.templates else b""
        if self.dialect is not SLUICE:
            return lines
        salt = self.cache_salt(work)
        return lines + front_headers(work.tenant, work.org, SHARED_SALT if salt is None else salt_of(salt))

    def adapter_name(self, work: Work) -> str | None:
        """The adapter's name at the workers."""
        if work.adapter is None:
            return None
        if work.adapter.at is not None:
            return work.adapter.adapter_id
        if (adapter := self.to_load(work)) is not None:
            return loaded_name(adapter, self.section.adapters_folder)
        return self.section.adapters.get(work.adapter.adapter_id, work.adapter.adapter_id)

    def to_load(self, work: Work) -> Adapter | None:
        """The adapter, when this gateway loads it on the workers."""
        adapter, section = work.adapter, self.section
        if adapter is None or adapter.at is not None or adapter.adapter_id in section.adapters:
            return None
        # A Sluice loads its adapters itself.
        return adapter if section.load_adapters and self.dialect is VLLM else None

    def path(self, work: Work) -> str:
        """The endpoint for this work. A raw prompt has no messages.

        A Sluice reports the bytes of tokens with log-probabilities in chats alone.
        """
        exact_bytes = self.dialect is SLUICE and work.sampling.logprobs is not None
        as_ids = self.token_ids and not ((exact_bytes and work.partial is None) or self._needs_chat(work))
        return TEXT_PATH if as_ids or not work.messages else CHAT_PATH

    @property
    def continues(self) -> frozenset[Continue]:
        if self.dialect is OPENAI:
            return frozenset()
        if self.token_ids:
            return frozenset({Continue.TOKENS, Continue.CHATS} if self._by_text else {Continue.TOKENS})
        return self._by_text

    @property
    def _by_text(self) -> frozenset[Continue]:
        return frozenset({Continue.TEXT} if self.dialect is VLLM and self.completes else ())

    def ways(self, work: Work) -> frozenset[Continue]:
        """How the workers can resume this answer: a raw prompt has no message to complete."""
        if not work.messages and self.continues:
            return frozenset({Continue.TOKENS})
        return self._by_text if self._needs_chat(work) else self.continues

    def _needs_chat(self, work: Work) -> bool:
        """Whether the worker's own parsers are needed, which work on chats alone."""
        if not work.messages:
            return False
        if work.tools or work.reasoning_effort is not None or work.template_kwargs or work.images:
            return True
        return self.section.prompt == "auto" and self.dialect is VLLM and bool(work.extra)

    def write(self, work: Work, now: float = 0.0) -> WrittenRequest:
        """Write the request. Always a stream, to time the first token and cancel by closing.

        The base64 of images is written into the body while it is sent.
        """
        sampling, path, partial = work.sampling, self.path(work), work.partial
        chat, custom = path == CHAT_PATH, self.dialect is not VLLM
        running_counts = not custom and (not work.stream or sampling.echo)
        body: dict[str, Any] = {"model": self.model if work.adapter is None else self.adapter_name(work)}
        if chat:
            body["messages"] = self._messages(work, custom)
            if work.tools or work.reasoning_effort is not None or work.template_kwargs:
                body |= tool_fields(work, custom=custom)
            # Templates strip white space at a message's ends; an empty message cannot be continued.
            if partial is not None and (text := partial.text.rstrip()):
                body["messages"].append({"role": "assistant", "content": text})
                body |= {"continue_final_message": True, "add_generation_prompt": False}
        if not (chat and work.open_ended):  # the worker counts the messages itself, perhaps differently
            limit = 0 if sampling.prompt_only else sampling.max_tokens
            body[self.section.chat_limit_field if chat else "max_tokens"] = limit
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
        given: dict[str, float | None] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": resumed_seed(sampling.seed, partial),
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
        }
        if self.dialect is VLLM and sampling.n > 1 and sampling.temperature == 0:
            # vLLM refuses n > 1 with greedy sampling; top_k 1 is equivalent.
            given |= {"temperature": 1.0, "top_k": 1, "top_p": None, "min_p": None}
        for name, value in given.items():
            if value is not None:
                body[name] = value
        if sampling.stop:
            body["stop"] = sampling.stop
        if (values := _neutral_values(sampling)) != _NEUTRAL_VALUES:
            body |= {
                name: value for name, value in zip(_NEUTRAL, values, strict=True) if value != _NEUTRAL[name]
            }
        if sampling.min_tokens and (least := rest_of(sampling.min_tokens, partial)):
            body["min_tokens"] = least
        if sampling.stop_token_ids:
            body["stop_token_ids"] = sampling.stop_token_ids
        if sampling.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
        if sampling.logprobs is not None:
            self._add_logprobs(body, sampling.logprobs, chat)
        if work.response_format.type is not TEXT:
            self._add_format(body, work)
        if self.dialect is VLLM:
            # With token ids vLLM leaves the echoed prompt's text out.
            if len(work.token_ids) <= MAX_ECHOED_PROMPT and not sampling.echo:
                body["return_token_ids"] = True
            if (salt := self.cache_salt(work)) is not None:
                body["cache_salt"] = salt_of(salt)
            if not (work.stream or work.tools):
                body["stream_interval"] = STREAM_INTERVAL
            if running_counts:
                body["stream_options"]["continuous_usage_stats"] = True
        elif self.dialect is SLUICE:
            body["sluice"] = {"token_ids": True}
            if work.session_id is not None:
                body["sluice"]["session_id"] = work.session_id
            if work.deadline is not None:
                # Rounded up: the worker must not be the first to give up.
                left_ms = math.ceil((work.deadline - now) * 1000)
                body["sluice"]["deadline_ms"] = min(max(1, left_ms), MAX_DEADLINE_MS)
            if work.user is not None:
                body["user"] = work.user
        if (self.section.send_priority or self.dialect is SLUICE) and work.priority:
            # vLLM serves lower numbers first, Sluice higher ones. vLLM refuses a priority unless its
            # scheduling policy is ``priority``.
            body["priority"] = -work.priority if self.dialect is VLLM else work.priority
        fields = {**work.extra, **body} if work.extra else body
        data = orjson.dumps(fields) if chat else _with_prompt(work, fields)
        sent = _upload(parts_of_body(data, work.images)) if work.images else data
        return WrittenRequest(path, self.headers(work), sent, running_counts, custom)

    def _messages(self, work: Work, custom: bool) -> list[dict[str, Any]]:
        reasoning = None if self.dialect is OPENAI else "reasoning"
        return [
            message_body(m, reasoning=reasoning, custom=custom, images=work.images)
            # As ``Message.plain``, without a call a message.
            if m.tool_calls or m.tool_call_id or m.name or m.reasoning or m.parts
            else {"role": m.role, "content": m.content}
            for m in work.messages
        ]

    def _add_logprobs(self, body: dict[str, Any], count: int, chat: bool) -> None:
        if not chat:
            body["logprobs"] = count
        else:
            body["logprobs"] = True
            if count:
                body["top_logprobs"] = count
        if self.dialect is VLLM and self.knows_vocabulary:
            # In vLLM's texts and bytes the parts of a character look alike; token ids differ.
            body["return_tokens_as_token_ids"] = True

    def _add_format(self, body: dict[str, Any], work: Work) -> None:
        shape = work.response_format
        if shape.type is FormatType.JSON_OBJECT:
            body["response_format"] = {"type": "json_object"}
        elif shape.type is FormatType.JSON_SCHEMA:
            schema: dict[str, Any] = {"name": "answer", "schema": orjson.Fragment(shape.spec)}
            if shape.strict is not None:
                schema["strict"] = shape.strict
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif shape.type is FormatType.CHOICE:
            body["structured_outputs"] = {"choice": orjson.Fragment(shape.spec)}
        else:
            body["structured_outputs"] = {shape.type.value: shape.spec}


def _ids_as_json(ids: tuple[int, ...]) -> bytes:
    return orjson.dumps(ids)[1:-1]


# A conversation's next request has the same pieces and a few more. Two million tokens.
_IDS_AS_JSON: Final = PerPiece(_ids_as_json, 32 * 1024 * 1024)


def _with_prompt(work: Work, fields: dict[str, Any]) -> bytes:
    """The body with the ids of the prompt, and those of the part that is there of an answer.

    The ids are most of the body, so they are copied once only.
    """
    fields.pop("prompt", None)  # a field of the caller's with this name
    texts = _IDS_AS_JSON.of(work.token_ids)
    if work.partial is not None and work.partial.token_ids:
        texts.append(_ids_as_json(work.partial.token_ids))
    texts = [text for text in texts if text] or [b""]
    texts[0] = b'{"prompt":[' + texts[0]
    texts[-1] += b"]," + orjson.dumps(fields)[1:]
    return b",".join(texts)


def _upload(parts: Sequence[bytes | ImageData]) -> Upload:
    """A body in which images are among the bytes."""

    async def pieces() -> AsyncGenerator[bytes | memoryview]:
        for part in parts:
            for piece in (part,) if isinstance(part, bytes) else part.base64():
                yield piece

    length = sum([len(one) if isinstance(one, bytes) else one.base64_length for one in parts])
    return Upload(b"application/json", length, pieces)


def echoed_logprobs(work: Work) -> int:
    """How many log-probabilities of the prompt's tokens the answer has, for each of its texts."""
    sampling = work.sampling
    if not sampling.echo or sampling.logprobs is None:
        return 0
    return len(work.token_ids) * (sampling.logprobs + 1)


def supports_format(dialect: Dialect, shape: FormatType) -> bool:
    return shape is TEXT or dialect is not OPENAI or shape in _OPENAI_FORMATS


@lru_cache(MAX_SALTS)
def salt_of(tenant: str) -> str:
    """The tenant's salt, as a hash: vLLM restricts characters and length, and the name stays private."""
    return hashlib.blake2b(tenant.encode(), digest_size=16, person=b"sluice-salt").hexdigest()
