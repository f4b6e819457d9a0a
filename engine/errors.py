"""Everything the engine can raise.

EngineError
├── EngineStartError            the engine could not start; nothing runs
│   ├── ModelNotFound           the folder or one of its files is missing
│   ├── ModelTruncated          a file is cut short, unreadable or lacks a tensor
│   ├── UnsupportedArchitecture the checkpoint is of a kind this engine does not run
│   └── InvalidConfig           a setting is out of range or the device is not there
├── EngineDead                  the engine process ended; all its requests are lost
├── AdapterError                this LoRA adapter was not loaded or unloaded; nothing has changed
│   ├── AdapterNotFound         the folder or one of its files is missing
│   ├── AdapterUnreadable       a file is cut short, or is not what its name says
│   ├── AdapterUnsupported      it is of a kind, or asks for something, that this engine does not run
│   ├── AdapterMismatch         its tensors do not fit the model
│   ├── NoAdapterRoom           as many are loaded as may be, or memory is short; may be tried again
│   └── AdapterNotLoaded        no adapter of that id to unload
└── RequestRefused              this request alone was not taken; nothing was queued
    ├── PromptTooLong           no room for even one output token
    ├── EmptyPrompt             no prompt tokens
    ├── UnknownToken            a token id outside the vocabulary
    ├── InvalidSampling         a sampling parameter is out of range
    ├── InvalidGrammar          the shape asked for is not one that text can be held to
    ├── RequestedAdapterMissing the adapter it names is not loaded
    ├── DuplicateRequest        the request id is in flight already
    └── EngineBusy              the queue is full; may be tried again

Every class has a stable ``code``; the text of an error is one line without a traceback.
"""

from collections.abc import Iterator


class EngineError(Exception):
    """Base of all engine errors."""

    code = "engine_error"


class EngineStartError(EngineError):
    """The engine could not start."""

    code = "engine_start_failed"


class ModelNotFound(EngineStartError):
    """The model folder, or a file that must be in it, does not exist."""

    code = "model_not_found"


class ModelTruncated(EngineStartError):
    """A file of the model is cut short, is not readable, or lacks a tensor."""

    code = "model_truncated"


class UnsupportedArchitecture(EngineStartError):
    """The checkpoint's architecture, or a variant it asks for, is not one this engine runs."""

    code = "unsupported_architecture"


class InvalidConfig(EngineStartError):
    """A setting is out of range, or names a device or dtype that is not there."""

    code = "invalid_engine_config"


class EngineDead(EngineError):
    """The engine process has ended; its requests are lost and no more are taken."""

    code = "engine_dead"


class EngineAdapterError(EngineError):
    """A LoRA adapter was not loaded or unloaded; nothing has changed."""

    code = "adapter_error"


class AdapterNotFound(EngineAdapterError):
    """The adapter's folder, or a file that must be in it, does not exist."""

    code = "adapter_not_found"


class AdapterUnreadable(EngineAdapterError):
    """A file of the adapter is cut short, or is not JSON or safetensors."""

    code = "adapter_unreadable"


class AdapterUnsupported(EngineAdapterError):
    """The adapter is of a kind, or asks for something, that this engine does not run."""

    code = "adapter_unsupported"


class AdapterMismatch(EngineAdapterError):
    """The adapter's tensors are not those that its configuration and the model call for."""

    code = "adapter_mismatch"


class NoAdapterRoom(EngineAdapterError):
    """As many adapters are loaded or in use as may be, or memory is short; later there may be room."""

    code = "no_adapter_room"


class AdapterNotLoaded(EngineAdapterError):
    """There is no adapter of that id to unload."""

    code = "adapter_not_loaded"


class RequestRefused(EngineError):
    """The request was not taken; the others are not affected."""

    code = "request_refused"


class PromptTooLong(RequestRefused):
    """The prompt leaves no room for an output token in the model's length or in the KV pool."""

    code = "prompt_too_long"


class NoPromptTokens(RequestRefused):
    """The prompt has no tokens."""

    code = "empty_prompt"


class UnknownToken(RequestRefused):
    """A prompt token id is outside the model's vocabulary."""

    code = "unknown_token"


class InvalidSampling(RequestRefused):
    """A sampling parameter is out of range."""

    code = "invalid_sampling"


class InvalidGrammar(RequestRefused):
    """The schema, pattern, choice or grammar is malformed, unsupported, or too complex to follow."""

    code = "invalid_grammar"


class RequestedAdapterMissing(RequestRefused):
    """The adapter that the request names is not loaded."""

    code = "unknown_adapter"


class DuplicateSequence(RequestRefused):
    """A request with this id is in flight."""

    code = "duplicate_request"


class EngineBusy(RequestRefused):
    """As many requests are in flight as the engine takes; later it may take this one."""

    code = "engine_busy"


def _tree(root: type[EngineError]) -> Iterator[type[EngineError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


def error_from_code(code: str, message: str) -> EngineError:
    """Rebuilds, on this side of the process boundary, the error that had ``code`` on the other."""
    classes = {error.code: error for error in _tree(EngineError)}
    return classes.get(code, EngineError)(message)
