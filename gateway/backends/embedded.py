"""The embedded engine as a backend."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

from admission.values import Load
from engine import errors
from engine.client import EngineClient
from engine.values import EngineSignals, GenerationRequest, SamplingParams
from engine.values import FinishReason as EngineFinish
from gateway.backends.port import BackendState, Completion, Delta, DeltaSink, Feature, Work
from gateway.contracts.values import FinishReason, Sampling, Usage
from resilience.failures import BackendFailure, FailureKind

T = TypeVar("T")

FEATURES = frozenset(
    {Feature.TEMPERATURE, Feature.TOP_P, Feature.TOP_K, Feature.SEED, Feature.STOP, Feature.RAW_PROMPT}
)

_FINISH: Mapping[EngineFinish, FinishReason] = MappingProxyType(
    {
        EngineFinish.STOP: FinishReason.STOP,
        EngineFinish.LENGTH: FinishReason.LENGTH,
        EngineFinish.ABORTED: FinishReason.CANCELLED,
    }
)


class EmbeddedBackend:
    """Generates on the engine in the gateway's own process tree.

    Args:
        name: its name in the configuration.
        model: the base model's public id.
        client: the engine's client; started and stopped by the gateway's lifespan.
        defaults: sampling of the checkpoint's ``generation_config.json``, used where the caller is silent.
        max_running: most sequences that one batch takes.
    """

    kind = "embedded"
    features = FEATURES

    def __init__(
        self,
        name: str,
        *,
        model: str,
        client: EngineClient,
        defaults: Sampling,
        max_running: int,
    ) -> None:
        self.name = name
        self.model = model
        self._client = client
        self._defaults = defaults
        self._max_running = max_running

    @property
    def state(self) -> BackendState:
        """Where the engine stands."""
        return {
            "ready": BackendState.READY,
            "dead": BackendState.DEAD,
            "stopped": BackendState.STOPPED,
        }.get(self._client.state, BackendState.STARTING)

    @property
    def load(self) -> Load | None:
        """The engine's load after its last step."""
        signals = self._client.signals
        if signals is None:
            return None
        return load_of(signals, self._max_running)

    async def generate(self, work: Work, out: DeltaSink) -> Completion:
        """Generate; leaving early, in whatever way, aborts the sequence at once."""
        try:
            with self._client.submit(self._engine_request(work)) as ticket:
                while True:
                    output = await ticket.receive()
                    if output.finish_reason is EngineFinish.ERROR:
                        raise _failure(output.error or "internal")
                    if output.token_ids or output.text:
                        await out(
                            Delta(
                                output.text, len(output.token_ids), output.cached_tokens, output.queue_wait_s
                            )
                        )
                    if output.finish_reason is not None:
                        return Completion(
                            _FINISH[output.finish_reason],
                            Usage(output.prompt_tokens, output.output_tokens, output.cached_tokens),
                            output.queue_wait_s or 0.0,
                        )
        except errors.EngineError as error:
            raise _failure(error.code, str(error)) from error

    def _engine_request(self, work: Work) -> GenerationRequest:
        asked, default = work.sampling, self._defaults
        if asked.max_tokens is None:
            raise BackendFailure(FailureKind.INVALID_INPUT, "max_tokens is not set; the budget stage sets it")
        return GenerationRequest(
            request_id=work.generation_id,
            prompt_token_ids=work.token_ids,
            sampling=SamplingParams(
                max_tokens=asked.max_tokens,
                temperature=_first(asked.temperature, default.temperature, 1.0),
                top_p=_first(asked.top_p, default.top_p, 1.0),
                top_k=max(0, _first(asked.top_k, default.top_k, 0)),
                seed=asked.seed,
                stop=asked.stop,
            ),
            priority=work.priority,
        )


def load_of(signals: EngineSignals, max_running: int) -> Load:
    """The engine's signals in admission's terms."""
    return Load(
        running=signals.running,
        waiting=signals.waiting,
        kv_usage=signals.kv_usage,
        total_blocks=signals.total_blocks,
        block_size=signals.block_size,
        max_running=max_running,
    )


def _first(asked: T | None, default: T | None, neutral: T) -> T:
    if asked is not None:
        return asked
    return default if default is not None else neutral


# The engine's stable codes, by what they mean to the gateway; any other code is ``internal``.
_KINDS: Mapping[str, FailureKind] = MappingProxyType(
    {
        "nan_output": FailureKind.NAN_OUTPUT,
        "out_of_memory": FailureKind.CUDA_OOM,
        errors.EngineDead.code: FailureKind.ENGINE_DEAD,
        errors.PromptTooLong.code: FailureKind.TOKEN_LIMIT_EXCEEDED,
        errors.EmptyPrompt.code: FailureKind.INVALID_INPUT,
        errors.UnknownToken.code: FailureKind.INVALID_INPUT,
        errors.InvalidSampling.code: FailureKind.INVALID_INPUT,
        errors.EngineBusy.code: FailureKind.THROTTLED,
    }
)


def _failure(code: str, message: str | None = None) -> BackendFailure:
    return BackendFailure(_KINDS.get(code, FailureKind.INTERNAL), message or f"the engine reported {code}")
