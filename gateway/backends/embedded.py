"""The embedded engine as a backend."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import ClassVar

from msgspec import structs

from admission.values import BackendLoad
from budgeting.token_ids import joined
from engine import errors
from engine.client import EngineClient, EngineState, receive_any
from engine.values import (
    GenerationRequest,
    GrammarKind,
    SamplingParams,
    SequenceEnd,
    SequenceOutput,
    StructuredOutput,
    TokenIdLogprob,
)
from gateway.backends.embedded_failures import failure_of
from gateway.backends.embedded_vectors import EncodePart, generates_nothing, vectors_of
from gateway.backends.hermes import CallReader
from gateway.backends.lora_slots import LoraSlots
from gateway.backends.partial_answer import check_partial
from gateway.backends.port import (
    BackendState,
    Completion,
    Continue,
    DeltaSink,
    Work,
)
from gateway.backends.sampling import filled
from gateway.contracts.embeddings import EmbeddingsAnswer, EmbeddingsRequest
from gateway.contracts.events import Delta
from gateway.contracts.features import KNOWN_FEATURES, TOOL_FEATURES, Feature
from gateway.contracts.values import (
    FinishReason,
    FormatType,
    ResponseFormat,
    Sampling,
    TokenLogprob,
    Usage,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedBackend:
    """Generates on the engine in the gateway's own process tree; implements ``Embeds`` too.

    Args:
        client: the engine's client; started and stopped by the gateway's lifespan.
        defaults: sampling of the checkpoint's ``generation_config.json``, used where the caller sets none.
        max_running: most sequences in one batch.
        adapters: the LoRA slots of the engine; shared by all backends of one engine.
        encode: tokenizes the inputs of embeddings.
        generates: false if the engine makes vectors alone.
        calls_tools: whether the model's chat template shows tools, and calls as :class:`CallReader` reads.
    """

    kind: ClassVar = "embedded"
    continues: ClassVar = frozenset({Continue.TOKENS, Continue.SHAPED, Continue.EVENTS})

    name: str
    model: str
    client: EngineClient
    defaults: Sampling
    max_running: int
    token_bytes: Callable[[int], bytes]
    adapters: LoraSlots
    encode: EncodePart
    share_prefixes: bool = False
    calls_tools: bool = False
    generates: bool = True

    @property
    def features(self) -> frozenset[Feature]:
        """The known features; adapters only if the engine has places for them, tools if it calls tools."""
        known = KNOWN_FEATURES | TOOL_FEATURES if self.calls_tools else KNOWN_FEATURES
        return known if self.adapters.places else known - {Feature.LORA}

    @property
    def state(self) -> BackendState:
        return _STATES[self.client.state]

    @property
    def load(self) -> BackendLoad | None:
        signals = self.client.signals
        if signals is None:
            return None
        return BackendLoad(
            running=signals.running,
            waiting=signals.waiting,
            kv_usage=signals.kv_usage,
            total_blocks=signals.total_blocks,
            block_size=signals.block_size,
            max_running=self.max_running,
        )

    async def generate(self, work: Work, out: DeltaSink) -> Completion:
        """Generate; leaving early aborts the sequences at once.

        Several texts are sequences of their own; the engine's prefix cache shares the prompt's blocks.
        """
        if not self.generates:
            raise generates_nothing(self.name)
        ends: dict[int, Completion] = {}
        readers = await self._readers(work, out)
        try:
            async with AsyncExitStack() as held:
                if work.adapter is not None:
                    await held.enter_async_context(self.adapters.hold(work.adapter))
                going = {
                    held.enter_context(self.client.submit(self._engine_request(work, index))): index
                    for index in range(work.sampling.n)
                }
                while going:
                    for ticket, output in await receive_any(going):
                        if output.finish_reason is SequenceEnd.ERROR:
                            raise failure_of(output.error or "internal", output.detail)
                        index = going[ticket]
                        reader = readers.get(index)
                        if output.token_ids or output.text:
                            delta = self._delta(output, index)
                            for event in (delta,) if reader is None else reader.feed(delta):
                                await out(event)
                        if output.finish_reason is not None:
                            reason = FinishReason(output.finish_reason)  # stop or length
                            if reader is not None:
                                stopped = reason is FinishReason.STOP
                                by_model = stopped and output.stop_reason is None
                                for event in reader.end(stopped=stopped, by_model=by_model):
                                    await out(event)
                                if reason is FinishReason.STOP:
                                    reason = _end_of(reader)
                            del going[ticket]
                            ends[index] = _completion(output, reason)
        except errors.EngineError as error:
            raise failure_of(error.code, str(error)) from error
        return _joined([ends[index] for index in range(work.sampling.n)])

    async def embed(self, part: EmbeddingsRequest) -> EmbeddingsAnswer:
        try:
            return await vectors_of(part, self.client, self.encode)
        except errors.EngineError as error:
            raise failure_of(error.code, str(error)) from error

    async def _readers(self, work: Work, out: DeltaSink) -> dict[int, CallReader]:
        """A reader of calls for each choice; that of a resumed answer has read the partial answer."""
        if work.call_format is None:
            return {}
        tools = {tool.name: tool for tool in work.tools}
        must_call = work.tool_choice is not None and work.tool_choice.forces_call
        readers = {
            index: CallReader(work.generation_id, index, must_call=must_call, tool_of=tools.__getitem__)
            for index in range(work.sampling.n)
        }
        if (partial := work.partial) is not None:
            text = partial.text if partial.generated is None else partial.generated
            events = readers[0].feed(Delta(text, 0))
            for event in events if partial.replay else ():
                await out(event)
        return readers

    def _delta(self, output: SequenceOutput, index: int) -> Delta:
        logprobs = tuple([self._logprob(entry) for entry in output.logprobs]) if output.logprobs else ()
        # Further texts hit the prefix cached by the first one, so only the first one's figures are reported.
        cached, wait_s = (None, None) if index else (output.cached_tokens, output.queue_wait_s)
        return Delta(output.text, len(output.token_ids), cached, wait_s, index, logprobs, output.token_ids)

    def _logprob(self, entry: TokenIdLogprob) -> TokenLogprob:
        top = tuple([TokenLogprob(self.token_bytes(token), logprob) for token, logprob in entry.top])
        return TokenLogprob(self.token_bytes(entry.token_id), entry.logprob, top)

    def _engine_request(self, work: Work, index: int) -> GenerationRequest:
        wanted = filled(work.sampling, self.defaults)
        assert wanted.max_tokens is not None and wanted.temperature is not None and wanted.top_p is not None
        assert wanted.top_k is not None and wanted.min_p is not None
        check_partial(work, self.continues, self.name)
        return GenerationRequest(
            request_id=f"{work.generation_id}/{index}" if index else work.generation_id,
            prompt_token_ids=joined(work.token_ids),
            sampling=SamplingParams(
                max_tokens=wanted.max_tokens,
                temperature=wanted.temperature,
                top_p=wanted.top_p,
                top_k=wanted.top_k,
                seed=None if wanted.seed is None else wanted.seed + index,
                stop=wanted.stop,
                stop_token_ids=wanted.stop_token_ids,
                ignore_eos=wanted.ignore_eos,
                min_tokens=wanted.min_tokens,
                min_p=wanted.min_p,
                repetition_penalty=wanted.repetition_penalty,
                presence_penalty=wanted.presence_penalty,
                frequency_penalty=wanted.frequency_penalty,
                logit_bias=tuple(wanted.logit_bias.items()),
                logprobs=wanted.logprobs,
                structured=_structured(work.call_format or work.response_format),
            ),
            priority=work.priority,
            cache_salt=None if self.share_prefixes else work.cache_salt,
            adapter_id=work.adapter.adapter_id if work.adapter else None,
            partial_token_ids=work.partial_ids,
        )


def _end_of(reader: CallReader) -> FinishReason:
    """The finish reason of a text that the engine stopped; inside a call a stop string has cut the call."""
    if reader.in_call:
        return FinishReason.LENGTH
    return FinishReason.TOOL_CALLS if reader.calls else FinishReason.STOP


def _completion(last: SequenceOutput, reason: FinishReason) -> Completion:
    usage = Usage(last.prompt_tokens, last.output_tokens, last.cached_tokens)
    stop = last.stop_reason if isinstance(last.stop_reason, str) else None
    if reason is FinishReason.LENGTH:  # the stop string has cut a call
        stop = None
    return Completion(reason, usage, last.queue_wait_s or 0.0, stop_sequence=stop)


def _joined(ends: list[Completion]) -> Completion:
    """One completion. The prompt and its cached tokens count once, as for the first text."""
    first, *others = ends
    output_tokens = sum(end.usage.output_tokens for end in ends)
    return structs.replace(
        first,
        usage=structs.replace(first.usage, output_tokens=output_tokens),
        others=tuple(end.finish_reason for end in others),
    )


def _structured(shape: ResponseFormat) -> StructuredOutput | None:
    if shape.type is FormatType.TEXT:
        return None
    return StructuredOutput(GrammarKind(shape.type.value), shape.spec, shape.grammar_bytes)


# An engine that is not started yet is about to start.
_STATES = {one: BackendState("starting" if one is EngineState.NEW else one) for one in EngineState}
