"""Fields of OpenAI's and vLLM's bodies that Sluice knows but does not implement.

Each is accepted with the values that have no effect, so that clients which always send them work. A refusal
of any other value names the field. ``ANYTHING`` marks labels that have no effect on an answer.
"""

from typing import Final

from gateway.contracts.fields import ANYTHING, Instead, Neutral

_NULL: Final[tuple[object, ...]] = (None,)
_NO_LIST: Final[tuple[object, ...]] = (None, [])
_NO_OBJECT: Final[tuple[object, ...]] = (None, {})
_FALSE: Final = (None, False)
_TRUE: Final = (None, True)

# Anthropic's mark, which LiteLLM sends on messages, parts and tools, and OpenAI's of parts.
# Prefixes are cached without them.
CACHE_MARK: Final[Neutral] = {"cache_control": (ANYTHING,), "prompt_cache_breakpoint": (ANYTHING,)}

# OpenAI's service options, common to chats, completions and responses.
SERVICE: Final[Neutral] = {
    "moderation": _NULL,
    "prompt_cache_options": (ANYTHING,),
    "prompt_cache_retention": (None, "in_memory", "in-memory", "24h"),
    "safety_identifier": (ANYTHING,),
    "service_tier": (None, "auto", "default"),
}

_SHARED: Final[Neutral] = {
    # vLLM's extensions, common to both paths.
    "add_special_tokens": _FALSE,
    "allowed_token_ids": _NULL,
    "bad_words": _NO_LIST,
    "best_of": (None, 1),
    "cache_salt": (None, ""),
    "ec_transfer_params": _NO_OBJECT,
    "guided_decoding_backend": (ANYTHING,),  # not which shape, but what enforces it
    "guided_whitespace_pattern": _NULL,
    "include_stop_str_in_output": _FALSE,
    "kv_transfer_params": _NO_OBJECT,
    "length_penalty": (None, 1),
    "logits_processors": _NO_LIST,
    "logprob_token_ids": _NULL,
    "prompt_embeds": _NULL,  # of text completions, as which chats go to workers with ``prompt: token_ids``
    "prompt_logprobs": (None, Instead("echo with logprobs in /v1/completions")),
    "request_id": _NULL,
    "return_token_ids": _FALSE,
    "return_tokens_as_token_ids": _FALSE,
    "skip_special_tokens": _TRUE,
    "spaces_between_special_tokens": _TRUE,
    "thinking_token_budget": _NULL,
    "truncate_prompt_tokens": _NULL,
    "use_beam_search": _FALSE,
    "vllm_xargs": _NO_OBJECT,
    **SERVICE,
    "metadata": (ANYTHING,),
    "prompt_cache_key": (ANYTHING,),
    "store": _FALSE,
}

TRANSFERS: Final = frozenset({"kv_transfer_params", "ec_transfer_params"})
"""They name hosts from which a vLLM worker fetches caches. vLLM also reads them from ``vllm_xargs``."""

PASSABLE: Final = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "thinking_token_budget",
        "vllm_xargs",
    }
)
"""vLLM's fields that are passed to workers that accept unknown fields; none changes an answer's format."""

CHAT: Final[Neutral] = {
    **_SHARED,
    "audio": _NULL,
    "chat_template": (None, ""),
    "documents": _NO_LIST,
    "echo": _FALSE,
    "function_call": (None, "none", "auto", Instead("tool_choice")),
    "functions": (*_NO_LIST, Instead("tools")),
    "include_reasoning": (None, True, False),
    "media_io_kwargs": _NO_OBJECT,
    "mm_processor_kwargs": _NO_OBJECT,
    "modalities": (None, ["text"]),
    "prediction": (ANYTHING,),
    "prompt": _NULL,
    "return_prompt_text": _FALSE,
    "verbosity": (None, "medium"),
    "web_search_options": _NULL,
}

COMPLETIONS: Final[Neutral] = {
    **_SHARED,
    "add_special_tokens": _TRUE,
    "messages": _NULL,
    "suffix": (None, ""),
}

# Fields of the official client's message objects that are sent back as history; ``parsed`` is the content as
# the client has parsed it.
MESSAGE: Final[Neutral] = {
    "annotations": _NO_LIST,
    "audio": _NULL,
    **CACHE_MARK,
    "function_call": (None, Instead("tool_calls")),
    "parsed": (ANYTHING,),
}

TOKENIZE: Final[Neutral] = {
    "chat_template": (None, ""),
    "mm_processor_kwargs": _NO_OBJECT,
}

STREAM_OPTIONS: Final[Neutral] = {
    "include_obfuscation": (None, True, False),
}
