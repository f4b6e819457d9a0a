"""Why vLLM did not start, in one line that says what to mend."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.errors import (
    EngineStartError,
    InvalidConfig,
    ModelNotFound,
    ModelTruncated,
    UnsupportedArchitecture,
)
from gateway.backends.vllm.child_logs import ChildLogLine
from gateway.config.engine import EngineSection

MAX_LINE = 400
# vLLM's errors that only point at the one above them.
_POINTERS = re.compile(
    r"initialization failed|see (the )?(root cause|stack trace)|core proc|failed to start", re.IGNORECASE
)
_NOISE = re.compile(r"\s*\[type=\w+,.*|\s*For further information visit.*", re.DOTALL)

_Tell = Callable[["re.Match[str]", EngineSection], EngineStartError]


def _architecture(found: re.Match[str], section: EngineSection) -> EngineStartError:
    return UnsupportedArchitecture(
        f"engine.model: {section.model}: vLLM does not run the architecture {found[1]}; "
        "serve a checkpoint of one that it does (docs.vllm.ai, supported models)"
    )


def _no_architecture(found: re.Match[str], section: EngineSection) -> EngineStartError:
    return UnsupportedArchitecture(
        f"engine.model: {section.model}: config.json names no architecture that vLLM knows "
        f"({found[0].strip()})"
    )


def _length(found: re.Match[str], section: EngineSection) -> EngineStartError:
    return InvalidConfig(
        f"engine.max_model_len: {found[1]} is more than the model was made for; allowed: at most {found[2]}"
    )


def _kv_memory(found: re.Match[str], section: EngineSection) -> EngineStartError:
    return InvalidConfig(
        f"engine.max_model_len: a sequence of {section.max_model_len} tokens needs {found[1]} GiB of KV "
        f"cache and there are {found[2]} GiB; allowed here: at most {found[3]}, or raise "
        "engine.kv_cache_bytes (engine.gpu_memory_utilization on a GPU)"
    )


def _no_kv_memory(found: re.Match[str], section: EngineSection) -> EngineStartError:
    return InvalidConfig(
        "engine.gpu_memory_utilization: after the weights nothing is left for the KV cache; raise it, set "
        "engine.kv_cache_bytes, or serve a smaller or quantized model"
    )


def _cpu_memory(found: re.Match[str], section: EngineSection) -> EngineStartError:
    return InvalidConfig(
        f"engine.kv_cache_bytes: {found[2]} GiB are asked for and {found[1]} GiB of memory are free; "
        "lower it or free memory"
    )


def _gpu_memory(found: re.Match[str], section: EngineSection) -> EngineStartError:
    return InvalidConfig(
        "engine.gpu_memory_utilization: the GPU has too little free memory; end what else runs on it, lower "
        f"the share ({section.gpu_memory_utilization}) or serve a smaller or quantized model"
    )


def _truncated(found: re.Match[str], section: EngineSection) -> EngineStartError:
    return ModelTruncated(
        f"engine.model: {section.model}: one of its files is cut short or damaged ({found[0].strip()}); "
        "fetch the model again"
    )


def _no_weights(found: re.Match[str], section: EngineSection) -> EngineStartError:
    return ModelNotFound(f"engine.model: {section.model} has no weights (*.safetensors, *.bin)")


_KNOWN: Sequence[tuple[re.Pattern[str], _Tell]] = tuple(
    (re.compile(pattern, re.IGNORECASE | re.DOTALL), tell)
    for pattern, tell in (
        (r"architectures? \[?'?([\w, ']+?)'?\]? (?:are|is) not supported", _architecture),
        (r"(?:model type|model_type).{0,80}(?:not recogni[sz]ed|does not recogni[sz]e)", _no_architecture),
        (r"(?:unrecognized model|should have a `model_type` key)[^\n]{0,80}", _no_architecture),
        (r"max_model_len\D{0,5}\(?(\d+)\)? is greater than the derived max_model_len\D*=?(\d+)", _length),
        (
            r"max seq len \(\d+\)[^(]*\(?([\d.]+) GiB KV cache is needed.*?\(([\d.]+) GiB\)"
            r".*?maximum model length is (\d+)",
            _kv_memory,
        ),
        (r"no available memory for the cache blocks", _no_kv_memory),
        (
            r"Available memory on node \d+ \(([\d.]+)/[\d.]+ GiB\).*?requested memory for kv \(([\d.]+)",
            _cpu_memory,
        ),
        (r"free memory on device.{0,200}less than desired|cuda out of memory|OutOfMemoryError", _gpu_memory),
        (
            r"SafetensorError[^\n]{0,120}|HeaderTooLarge|InvalidHeader|MetadataIncompleteBuffer|JSONDecodeError[^\n]{0,80}"
            r"|Expecting (?:value|property name|',' delimiter)[^\n\[]{0,40}|Unterminated string[^\n\[]{0,40}",
            _truncated,
        ),
        (r"cannot find any model weights", _no_weights),
    )
)


def explain(error: BaseException, errors: Sequence[ChildLogLine], section: EngineSection) -> EngineStartError:
    """The start's error, boiled down.

    Args:
        error: what came out of vLLM in this process.
        told: the errors of its other processes, the oldest first.
        section: the configuration.
    """
    if isinstance(error, EngineStartError):
        return error
    reasons = [each.error for each in errors if each.error]
    reasons.append(f"{type(error).__name__}: {error}")
    for reason in reasons:
        for pattern, tell in _KNOWN:
            if found := pattern.search(reason):
                return tell(found, section)
    first = next((reason for reason in reasons if not _POINTERS.search(reason)), reasons[-1])
    return EngineStartError(f"vLLM did not start: {_line(first)}")


def _line(reason: str) -> str:
    text = " ".join(_NOISE.sub("", reason).split())
    return text if len(text) <= MAX_LINE else f"{text[:MAX_LINE]}…"


def check_folder(section: EngineSection) -> None:
    """Refuse a model folder that is plainly not one, before vLLM is imported for it.

    Raises:
        ModelNotFound: names the folder.
    """
    folder = Path(section.model)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelNotFound(f"engine.model: {folder} has no config.json; name the folder of a checkpoint")
    looks_local = (
        folder.is_absolute() or section.model.startswith((".", "~")) or section.model.count("/") != 1
    )
    if looks_local and not folder.is_dir():
        raise ModelNotFound(f"engine.model: the folder {folder} does not exist")
