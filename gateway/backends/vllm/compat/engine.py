"""A running vLLM: converts requests, outputs, adapters and errors to and from its types."""

import asyncio
import json
from base64 import b64encode
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import orjson
import psutil
from msgspec import structs

from budgeting.token_ids import joined
from engine import errors
from gateway.backends.delta_forwarder import DeltaForwarder
from gateway.backends.partial_answer import rest_of
from gateway.backends.port import Completion, DeltaSink, Work
from gateway.backends.tool_bodies import message_body, parts_of_body, tool_bodies
from gateway.backends.vllm.answer_parser import AnswerParser
from gateway.backends.vllm.compat.answer import OutputReader, Outputs
from gateway.backends.vllm.compat.parsers import MAX_MESSAGE, Parsers
from gateway.backends.vllm.compat.receiver import receive_faster
from gateway.backends.vllm.compat.signals import SignalBoard
from gateway.backends.vllm.compat.steps import CoreSteps
from gateway.backends.vllm.parser_names import ParserNames
from gateway.backends.vllm.values import EngineShape, Lora
from gateway.contracts.values import FormatType, ResponseFormat, template_variables
from resilience.classify import classify
from resilience.failures import BackendFailure, FailureKind, invalid_input
from resilience.heartbeat import PromptTokens

RETRY_AFTER_S = 1.0  # Retry-After, seconds, while the queue of an engine that bounds it is full


class VllmEngine:
    """A running vLLM."""

    def __init__(
        self,
        llm: Any,
        version: str,
        token_bytes: Callable[[int], bytes],
        max_loras: int,
        names: ParserNames,
        board: SignalBoard,
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
        self._steps = CoreSteps(llm, board)
        config = llm.vllm_config
        self.parser_names = names
        self._parsers = Parsers(llm.tokenizer, config.model_config, token_bytes, names)
        # Tokens of each prompt that is not computed yet, and whether it is for an adapter, by request id.
        self._pending: dict[str, tuple[int, bool]] = {}
        board.step_tokens = self._step_tokens = int(config.scheduler_config.max_num_batched_tokens)
        self.shape = EngineShape(
            max_model_len=int(config.model_config.max_model_len),
            block_size=int(config.cache_config.block_size),
            total_blocks=int(config.cache_config.num_gpu_blocks or 0),
            max_num_seqs=int(config.scheduler_config.max_num_seqs),
            engines=int(config.parallel_config.data_parallel_size),
            max_loras=max_loras,
            takes_images=bool(config.model_config.is_multimodal_model),
            pools=config.model_config.runner_type == "pooling",
            takes_seeds=config.device_config.device_type != "cpu"
            or not config.scheduler_config.enable_chunked_prefill,
            speculates=config.speculative_config is not None,
            details={
                "vllm": version,
                "device": str(config.device_config.device_type),
                "dtype": str(config.model_config.dtype).removeprefix("torch."),
                "quantization": config.model_config.quantization,
                "block_size": int(config.cache_config.block_size),
                "tool_parser": names.tool,
                "reasoning_parser": names.reasoning,
            },
        )

    @property
    def dead(self) -> bool:
        """Whether its core has ended by itself."""
        return bool(self._llm.errored)

    @property
    def unfinished(self) -> int:
        return len(self._llm.output_processor.request_states)

    @property
    def pending(self) -> PromptTokens:
        adapters = sum([tokens for tokens, for_adapter in self._pending.values() if for_adapter])
        base = sum([tokens for tokens, for_adapter in self._pending.values() if not for_adapter])
        return PromptTokens.in_a_step(base, adapters, self._step_tokens)

    @property
    def occupied(self) -> bool:
        return bool(self._llm.engine_core.utility_results)

    async def run(self, work: Work, out: DeltaSink, lora: Lora | None = None) -> Completion:
        """Generate; cancelling aborts the request. Raises BackendFailure.

        ``work.sampling`` has all fields set: defaults are filled in.
        """
        self._pending[work.generation_id] = work.input_tokens + len(work.partial_ids), lora is not None
        try:
            return await self._run(work, out, lora)
        finally:
            self._pending.pop(work.generation_id, None)

    async def _run(self, work: Work, out: DeltaSink, lora: Lora | None) -> Completion:
        parser = self._parsers.parsed(work, self._grammar(work.response_format))
        prompt = await self._input(work)
        prompt_tokens = len(prompt["prompt_token_ids"]) - len(work.partial_ids)
        if parser is not None and work.partial is not None and work.partial_ids:
            delivered = None if work.partial.replay else work.partial.text
            for event in parser.rest(work.partial_ids, delivered):
                await out(event)
        reader = OutputReader(work.sampling, prompt_tokens, parser, self._token_bytes)
        forwarder = DeltaForwarder(reader, out, lambda: self._pending.pop(work.generation_id, None))
        outputs = await self._added(work, prompt, parser, lora)
        try:
            while not reader.done:
                try:
                    await outputs.pass_on(forwarder.take)
                except Exception as error:
                    raise self._failure(error, work) from error
                await forwarder.rest()
        finally:
            forwarder.close()
            self._steps.remove(outputs)
            if not (reader.done or self.dead):
                await self._llm.abort(outputs.request_id, internal=True)
        return reader.completion()

    async def _input(self, work: Work) -> Any:
        """The prompt; one with images is rendered by vLLM, which decodes them and places their tokens."""
        if not work.images:
            return self._prompt([*joined(work.token_ids), *work.partial_ids], cache_salt=work.cache_salt)
        salt = {} if work.cache_salt is None else {"cache_salt": work.cache_salt}
        try:
            messages, tools = await asyncio.to_thread(_shown, work)
            variables = template_variables(work.reasoning_effort, work.template_kwargs)
            params = self._chat_params(
                chat_template_kwargs={"add_generation_prompt": True, "tools": tools, **variables}
            )
            _, (prompt,) = await self._llm.renderer.render_chat_async([messages], params, prompt_extras=salt)
        except Exception as error:
            if isinstance(error.__cause__ or error, OSError | SyntaxError):  # of the image library
                raise invalid_input("an image of the request is broken", "messages") from error
            raise self._failure(error, work) from error
        prompt["prompt_token_ids"] += work.partial_ids
        return prompt

    async def _added(
        self, work: Work, prompt: Any, parser: AnswerParser | None, lora: Lora | None
    ) -> Outputs:
        """Add the request; returns its outputs. Replaces vLLM's ``generate``, a generator to be awaited."""
        try:
            collector = await self._llm.add_request(
                work.generation_id,
                prompt,
                self._params(work, parser),
                lora_request=None if lora is None else self._lora(lora.key, lora.number, lora.path),
                priority=-work.priority,
                **(parser.options if parser is not None else {}),
            )
        except Exception as error:
            raise self._failure(error, work) from error
        outputs = Outputs(collector, self._steps.up_to_date)
        self._steps.add(outputs)
        return outputs

    async def embed(self, request_id: str, token_ids: tuple[int, ...], dimensions: int | None) -> str:
        """A vector as base64 of little-endian 32-bit floats; for the pooling runner alone.

        Cancelling aborts the request. Raises BackendFailure.
        """
        params = self._pooling(task="embed", dimensions=dimensions)
        self._pending[request_id] = len(token_ids), False
        try:
            # Priority 1: after the chats that share the device.
            made = self._llm.encode(self._prompt(list(token_ids)), params, request_id, priority=1)
            async with aclosing(made) as outputs:
                output = [one async for one in outputs][-1]
            vector: bytes = output.outputs.data.float().numpy().tobytes()
            return b64encode(vector).decode()
        except Exception as error:
            raise self._failure(error) from error
        finally:
            self._pending.pop(request_id, None)

    def _params(self, work: Work, parser: AnswerParser | None) -> Any:
        sampling: Any = work.sampling
        grammar = self._grammar(work.response_format) if parser is None else parser.request.structured_outputs
        if sampling.n > 1 and not sampling.temperature:
            # vLLM refuses n > 1 with greedy sampling; top_k 1 is equivalent.
            sampling = structs.replace(sampling, temperature=1.0, top_p=1.0, top_k=1, min_p=0.0)
        return self._sampling(
            n=sampling.n,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed if self.shape.takes_seeds else None,
            stop=list(sampling.stop),
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=sampling.ignore_eos,
            min_tokens=min(sampling.max_tokens, rest_of(sampling.min_tokens, work.partial)),
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=dict(sampling.logit_bias) or None,
            logprobs=sampling.logprobs,
            structured_outputs=grammar,
            skip_special_tokens=parser is None or parser.request.skip_special_tokens,
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

    def _failure(self, error: Exception, work: Work | None = None) -> BackendFailure:
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
        if work is None and param is None:
            param = "dimensions" if "imensions" in text else "input"
        elif param is None and work is not None:
            shaped = work.response_format.type is not FormatType.TEXT
            param = "response_format" if shaped else "tools" if work.tools else None
        return invalid_input(text, param)

    async def add_lora(self, lora: Lora) -> None:
        """Load a further adapter. Raises EngineError; nothing has changed then."""
        try:
            loaded = await self._llm.add_lora(self._lora(lora.key, lora.number, lora.path))
        except self._dead_error as error:
            raise errors.EngineDead("vLLM's core has ended") from error
        except Exception as error:
            raise _adapter_error(lora, str(error)) from error
        if not loaded:
            raise errors.AdapterUnreadable(f"adapter {lora.name}: vLLM did not load {lora.path}")

    async def remove_lora(self, number: int) -> None:
        """Unload an adapter; one that vLLM has dropped already is no error."""
        try:
            await self._llm.remove_lora(number)
        except self._dead_error as error:
            raise errors.EngineDead("vLLM's core has ended") from error

    async def pin_lora(self, number: int) -> bool:
        """Keep a loaded adapter in a place of the batch until it is removed; returns whether it has one.

        Raises EngineDead.
        """
        try:
            return bool(await self._llm.pin_lora(number))
        except self._dead_error as error:
            raise errors.EngineDead("vLLM's core has ended") from error
        except Exception:
            return False  # unloaded meanwhile, or all places are in use

    async def prepare(self) -> None:
        """Ask the core what it can do, once, so that no request waits for it."""
        receive_faster(self._llm.engine_core, self._steps)
        await self._llm.get_supported_tasks()

    def give_up(self) -> None:
        """Fail all calls that wait for the core, which has ended or is about to. On the event loop.

        vLLM lets some of them wait for ever if the core was killed.
        """
        self._llm.output_processor.propagate_error(self._dead_error())
        for result in self._llm.engine_core.utility_results.values():
            if not result.done():
                result.set_exception(self._dead_error())

    def shutdown(self, timeout_s: float) -> None:
        """End the core, by force after ``timeout_s``. Blocks; not for the event loop."""
        try:
            self._llm.shutdown(timeout=timeout_s)
        except psutil.NoSuchProcess:
            # vLLM lists the children of a core that it kills, and fails if the core ends meanwhile. Sockets
            # stay open then; ZMQ would wait for them for ever, in the thread that collects garbage.
            self._llm.engine_core.resources()
            self._llm.shutdown(timeout=timeout_s)  # what remains


def _shown(work: Work) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages with their images, and tools, in the form in which vLLM's own server gets them."""
    messages = [message_body(one, reasoning="reasoning", images=work.images) for one in work.messages]
    pieces: list[bytes | memoryview] = []
    for part in parts_of_body(orjson.dumps(messages), work.images):
        pieces += [part] if isinstance(part, bytes) else part.base64()
    tools = orjson.loads(orjson.dumps(tool_bodies(work.tools, custom=False))) if work.tools else None
    return orjson.loads(b"".join(pieces)), tools


def _adapter_error(lora: Lora, text: str) -> errors.EngineAdapterError:
    line = f"adapter {lora.name}: {' '.join(text.split())[:MAX_MESSAGE]}"
    if "rank" in text:
        return errors.AdapterUnsupported(line)
    if "No adapter found" in text or "No such file" in text:
        return errors.AdapterNotFound(line)
    if "shape" in text or "size" in text:
        return errors.AdapterMismatch(line)
    return errors.AdapterUnreadable(line)
