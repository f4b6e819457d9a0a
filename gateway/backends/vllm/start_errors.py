"""Why vLLM did not start, in one line that says what to change."""

import re
from collections.abc import Sequence
from pathlib import Path

from engine.errors import (
    EngineKilled,
    EngineStartError,
    InvalidConfig,
    ModelNotFound,
    ModelTruncated,
    UnsupportedArchitecture,
)
from gateway.backends.vllm.child_logs import ChildLogLine
from gateway.config.engine import EngineSection

MAX_LINE = 400
# vLLM's errors that only refer to an earlier error.
_POINTERS = re.compile(
    r"initialization failed|see (the )?(root cause|stack trace)|core proc|failed to start", re.IGNORECASE
)
_NOISE = re.compile(r"\s*\[type=\w+,.*|\s*For further information visit.*", re.DOTALL)

# A pattern of vLLM's error, our class and text. ``{0}`` is the match, ``{1}`` the pattern's first group.
_KNOWN: Sequence[tuple[re.Pattern[str], type[EngineStartError], str]] = tuple(
    (re.compile(pattern, re.IGNORECASE | re.DOTALL), kind, text)
    for pattern, kind, text in (
        (
            r"architectures? \[?'?([\w, ']+?)'?\]? (?:are|is) not supported",
            UnsupportedArchitecture,
            "engine.model: {model}: vLLM does not run the architecture {1}; "
            "serve a checkpoint of one that it does (docs.vllm.ai, supported models)",
        ),
        (
            r"(?:model type|model_type).{0,80}(?:not recogni[sz]ed|does not recogni[sz]e)"
            r"|(?:unrecognized model|should have a `model_type` key)[^\n]{0,80}",
            UnsupportedArchitecture,
            "engine.model: {model}: config.json names no architecture that vLLM knows ({0})",
        ),
        (
            r"max_model_len\D{0,5}\(?(\d+)\)? is greater than the derived max_model_len\D*=?(\d+)",
            InvalidConfig,
            "engine.max_model_len: {1} is more than the model was made for; allowed: at most {2}",
        ),
        (
            r"max seq len \(\d+\)[^(]*\(?([\d.]+) GiB KV cache is needed.*?\(([\d.]+) GiB\)"
            r".*?maximum model length is (\d+)",
            InvalidConfig,
            "engine.max_model_len: a sequence of {max_model_len} tokens needs {1} GiB of KV cache and there "
            "are {2} GiB; allowed here: at most {3}, or raise engine.kv_cache_bytes "
            "(engine.gpu_memory_utilization on a GPU)",
        ),
        (
            r"no available memory for the cache blocks",
            InvalidConfig,
            "engine.gpu_memory_utilization: after the weights nothing is left for the KV cache; raise it, "
            "set engine.kv_cache_bytes, or serve a smaller or quantized model",
        ),
        (
            r"Available memory on node \d+ \(([\d.]+)/[\d.]+ GiB\).*?requested memory for kv \(([\d.]+)",
            InvalidConfig,
            "engine.kv_cache_bytes: {2} GiB are asked for and {1} GiB of memory are free; "
            "lower it or free memory",
        ),
        (
            r"free memory on device.{0,200}less than desired|cuda out of memory|OutOfMemoryError",
            InvalidConfig,
            "engine.gpu_memory_utilization: the GPU has too little free memory; end what else runs on it, "
            "lower the share ({gpu_memory_utilization}) or serve a smaller or quantized model",
        ),
        (
            r"SafetensorError[^\n]{0,120}|HeaderTooLarge|InvalidHeader|MetadataIncompleteBuffer|JSONDecodeError[^\n]{0,80}"
            r"|Expecting (?:value|property name|',' delimiter)[^\n\[]{0,40}|Unterminated string[^\n\[]{0,40}",
            ModelTruncated,
            "engine.model: {model}: one of its files is cut short or damaged ({0}); fetch the model again",
        ),
        (
            r"cannot find any model weights",
            ModelNotFound,
            "engine.model: {model} has no weights (*.safetensors, *.bin)",
        ),
    )
)


def explain(error: BaseException, errors: Sequence[ChildLogLine], section: EngineSection) -> EngineStartError:
    """The start's error as one line; ``errors`` are those of vLLM's other processes, oldest first."""
    if isinstance(error, EngineStartError):
        return error
    reasons = [each.error for each in errors if each.error]
    reasons.append(f"{type(error).__name__}: {error}")
    for reason in reasons:
        for pattern, kind, text in _KNOWN:
            if found := pattern.search(reason):
                groups = (found[0].strip(), *found.groups())
                return kind(text.format(*groups, **section.model_dump()))
    first = next((reason for reason in reasons if not _POINTERS.search(reason)), None)
    if first is None:
        return EngineKilled(f"vLLM did not start: {_line(reasons[-1])}")
    return EngineStartError(f"vLLM did not start: {_line(first)}")


def _line(reason: str) -> str:
    text = " ".join(_NOISE.sub("", reason).split())
    return text if len(text) <= MAX_LINE else f"{text[:MAX_LINE]}…"


def check_folder(section: EngineSection) -> None:
    """Raise ModelNotFound, which names the folder, if it cannot be a model's; before vLLM is imported."""
    folder = Path(section.model)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelNotFound(f"engine.model: {folder} has no config.json; name the folder of a checkpoint")
    looks_local = (
        folder.is_absolute() or section.model.startswith((".", "~")) or section.model.count("/") != 1
    )
    if looks_local and not folder.is_dir():
        raise ModelNotFound(f"engine.model: the folder {folder} does not exist")
