"""vLLM in process, as a backend that generates, and as one that makes vectors."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import ClassVar

from msgspec.structs import replace

from admission.values import BackendLoad
from engine import errors
from gateway.backends.embedded_vectors import NUMBERS, EncodePart, generates_nothing, inputs_of
from gateway.backends.lora_slots import LoraSlots
from gateway.backends.partial_answer import check_partial, generate_rest, resumed_seed
from gateway.backends.port import BackendState, Completion, Continue, DeltaSink, Work
from gateway.backends.sampling import filled
from gateway.backends.vllm.adapters import VllmAdapters
from gateway.backends.vllm.compat.engine import VllmEngine
from gateway.backends.vllm.compat.signals import SignalBoard
from gateway.contracts.embeddings import EmbeddingsAnswer, EmbeddingsRequest
from gateway.contracts.events import TAKEN
from gateway.contracts.features import KNOWN_FEATURES, Feature
from gateway.contracts.values import FormatType, ResponseFormat, Sampling
from resilience.failures import BackendFailure, FailureKind
from resilience.task_groups import all_or_error

# Longer than a block, so that the second prompt hits the first one's cached block.
PROMPT = 48
TOKENS = 8
NEEDED = 2  # the first requests of the warm-up that every engine must be able to answer


async def warm_up(engine: VllmEngine) -> None:
    """Run the first prefill, decode, sampling and grammar compilation: each is slow the first time.

    vLLM compiles what ranks log-probabilities, and on a GPU each kind of sampling, in the step of the first
    request that needs it. That may take longer than the supervisor waits for a step.

    Raises BackendFailure if the engine cannot generate; failures of the rest are ignored: not every model and
    configuration can.
    """
    length = min(PROMPT, engine.shape.max_model_len - TOKENS)
    if engine.shape.pools:
        await engine.embed("warm-up", (1,) * length, None)
        return
    drawn = Sampling(max_tokens=TOKENS, temperature=1.0, top_p=0.9, top_k=5, min_p=0.0, seed=1)
    greedy = Sampling(max_tokens=TOKENS, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    rest = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "min_tokens": 2}
    text, json_object = ResponseFormat(), ResponseFormat(FormatType.JSON_OBJECT)
    asked = (
        (greedy, text),
        (drawn, text),
        (replace(drawn, top_k=0, seed=None), text),
        (replace(drawn, top_p=1.0, seed=None), text),
        (replace(drawn, min_p=0.1, logit_bias={1: 1.0}, **rest), text),
        (replace(greedy, logprobs=1), text),
        (greedy, json_object),
    )
    for number, (sampling, wanted) in enumerate(asked):
        work = Work(f"warm-up-{number}", (1,) * length, (), sampling, wanted, cache_salt="warm-up")
        try:
            await engine.run(work, lambda delta: TAKEN)
        except BackendFailure:
            if number < NEEDED:
                raise


@dataclass(frozen=True, slots=True, kw_only=True)
class OnVllm:
    """The common part of the backends on vLLM in the gateway's process tree.

    Args:
        engine: the loaded engine; ``None`` while there is none.
    """

    kind: ClassVar = "vllm"

    name: str
    model: str
    engine: Callable[[], VllmEngine | None]
    state_of: Callable[[], BackendState]
    board: SignalBoard

    @property
    def state(self) -> BackendState:
        return self.state_of()

    @property
    def load(self) -> BackendLoad | None:
        engine = self.engine()
        return None if engine is None else self.board.load(engine.shape)

    def running(self) -> VllmEngine:
        """The engine. Raises BackendFailure while it takes no work."""
        engine = self.engine()
        if engine is None or self.state is not BackendState.READY:
            raise BackendFailure(FailureKind.ENGINE_DEAD, f"vLLM is {self.state.value}")
        return engine


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmBackend(OnVllm):
    """Generates on vLLM in the gateway's process tree.

    A partial answer is resumed as a longer prompt, whose tokens vLLM counts as prompt: ``presence_penalty``
    and ``frequency_penalty`` apply to the new tokens alone, and a seeded answer resumes with another seed,
    since vLLM's generator cannot be advanced.

    Args:
        defaults: sampling of the checkpoint's ``generation_config.json``, used where the caller sets none.
        slots: the adapters' slots; shared by all backends of one engine.
        takes_tools: whether there is a parser of tool calls.
    """

    continues: ClassVar = frozenset({Continue.TOKENS, Continue.EVENTS})

    defaults: Sampling
    loaded: VllmAdapters
    slots: LoraSlots
    share_prefixes: bool
    takes_tools: Callable[[], bool]

    @property
    def features(self) -> frozenset[Feature]:
        """The known features; adapters only if the engine has places, tools only if it has a parser.

        Images unless the model has loaded and takes none.
        """
        engine, features = self.engine(), KNOWN_FEATURES
        if self.takes_tools():
            features |= {Feature.TOOLS, Feature.ALLOWED_TOOLS}
        if engine is None or engine.shape.takes_images:
            features |= {Feature.IMAGES}
        if engine is not None and not engine.shape.takes_seeds:
            features -= {Feature.SEED}
        if engine is not None and engine.shape.speculates:
            features -= {Feature.MIN_P, Feature.LOGIT_BIAS}
        return features if self.slots.places else features - {Feature.LORA}

    async def generate(self, work: Work, out: DeltaSink) -> Completion:
        check_partial(work, self.continues, self.name)
        return await generate_rest(self._generate, work, out)

    async def _generate(self, work: Work, out: DeltaSink) -> Completion:
        engine = self.running()
        async with AsyncExitStack() as held:
            lora = None
            if work.adapter is not None:
                try:
                    await held.enter_async_context(self.slots.hold(work.adapter))
                except errors.EngineDead as error:
                    raise BackendFailure(FailureKind.ENGINE_DEAD, str(error)) from error
                lora = self.loaded.get(work.adapter.adapter_id)
            held.enter_context(self.board.sequences(work.sampling.n))
            sampling = replace(
                filled(work.sampling, self.defaults), seed=resumed_seed(work.sampling.seed, work.partial)
            )
            salt = None if self.share_prefixes else work.cache_salt
            return await engine.run(replace(work, sampling=sampling, cache_salt=salt), out, lora)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmPoolingBackend(OnVllm):
    """Makes vectors on vLLM in the gateway's process tree; generates nothing.

    Args:
        encode: tokenizes the inputs.
    """

    continues: ClassVar[frozenset[Continue]] = frozenset()
    features: ClassVar[frozenset[Feature]] = frozenset()
    generates: ClassVar = False

    encode: EncodePart

    async def generate(self, work: Work, out: DeltaSink) -> Completion:
        raise generates_nothing(self.name)

    async def embed(self, part: EmbeddingsRequest) -> EmbeddingsAnswer:
        engine = self.running()
        inputs = await inputs_of(part, self.encode, engine.shape.max_model_len)
        with self.board.sequences(len(inputs)):
            async with all_or_error() as group:
                tasks = [
                    group.create_task(engine.embed(f"embedding {next(NUMBERS)}", ids, part.dimensions))
                    for ids in inputs
                ]
        return EmbeddingsAnswer(part.model, [task.result() for task in tasks], sum(map(len, inputs)))
