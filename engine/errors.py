"""The closed tree of the engine's errors. Each class has a stable ``code``; the message of an error is one
line without a traceback.
"""

_BY_CODE: dict[str, type["EngineError"]] = {}


class EngineError(Exception):
    """Base of all engine errors."""

    code = "engine_error"

    def __init_subclass__(cls, code: str | None = None) -> None:
        if code is not None:
            cls.code = code
            _BY_CODE[code] = cls


class EngineStartError(EngineError, code="engine_start_failed"):
    """The engine could not start."""


class EngineKilled(EngineStartError, code="engine_killed"):
    """A process of the engine ended while the engine started, without an error of its own."""


class ModelNotFound(EngineStartError, code="model_not_found"):
    """The model folder, or a file that must be in it, does not exist."""


class ModelTruncated(EngineStartError, code="model_truncated"):
    """A file of the model is cut short, is not readable, or lacks a tensor."""


class UnsupportedArchitecture(EngineStartError, code="unsupported_architecture"):
    """This engine does not support the checkpoint's architecture, or one of its settings."""


class InvalidConfig(EngineStartError, code="invalid_engine_config"):
    """A setting is out of range, or names a device or dtype that is not there."""


class EngineDead(EngineError, code="engine_dead"):
    """The engine process has ended; its requests are lost and new ones are refused."""


class EngineAdapterError(EngineError, code="adapter_error"):
    """A LoRA adapter was not loaded or unloaded; nothing has changed."""


class AdapterNotFound(EngineAdapterError, code="adapter_not_found"):
    """The adapter's folder, or a file that must be in it, does not exist."""


class AdapterUnreadable(EngineAdapterError, code="adapter_unreadable"):
    """A file of the adapter is cut short, or is not JSON or safetensors."""


class AdapterUnsupported(EngineAdapterError, code="adapter_unsupported"):
    """This engine does not support the adapter's type, or one of its settings."""


class AdapterMismatch(EngineAdapterError, code="adapter_mismatch"):
    """The adapter's tensors do not match its configuration and the model."""


class NoAdapterRoom(EngineAdapterError, code="no_adapter_room"):
    """The limit of adapters that are loaded or in use is reached, or memory is short; a retry may succeed."""


class AdapterNotLoaded(EngineAdapterError, code="adapter_not_loaded"):
    """No adapter with that id is loaded."""


class RequestRefused(EngineError, code="request_refused"):
    """The request was refused; other requests are not affected."""


class PromptTooLong(RequestRefused, code="prompt_too_long"):
    """The prompt leaves no room for an output token in the model's length or in the KV pool."""


class NoPromptTokens(RequestRefused, code="empty_prompt"):
    """The prompt has no tokens."""


class UnknownToken(RequestRefused, code="unknown_token"):
    """A prompt token id is outside the model's vocabulary."""


class InvalidSampling(RequestRefused, code="invalid_sampling"):
    """A sampling parameter is out of range."""


class InvalidGrammar(RequestRefused, code="invalid_grammar"):
    """The schema, pattern, choice or grammar is malformed, unsupported, or too complex to follow."""


class RequestedAdapterMissing(RequestRefused, code="unknown_adapter"):
    """The adapter that the request names is not loaded."""


class DuplicateSequence(RequestRefused, code="duplicate_request"):
    """A request with this id is in flight."""


class EngineBusy(RequestRefused, code="engine_busy"):
    """The limit of requests in flight is reached; a retry may succeed."""


def error_from_code(code: str, message: str) -> EngineError:
    """The error that had this ``code`` in the other process."""
    return _BY_CODE.get(code, EngineError)(message)
