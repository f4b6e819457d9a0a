"""Computes how many sequences fit: divides a GPU's memory between weights, adapters, workspace and KV blocks.

vLLM measures the workspace at its start with its largest step, and gives the rest of its share to the KV
cache. Here the workspace is estimated, without a GPU; the engine's log has the exact figures.
"""

from dataclasses import dataclass, replace
from itertools import chain

from ops.planning.shape import GIB, LINEAR_BYTES, Gpu, ModelShape, PlanError

# CUDA context, cuBLAS and NCCL buffers, allocator slack; and the captured CUDA graphs. Round figures: with
# activations and logits they are the 2 GB that an 8B model needs on a 24 GB card.
RUNTIME_BYTES = GIB // 2
CUDA_GRAPH_BYTES = GIB // 2
# Bytes per logit in sampling: 16-bit output, 32-bit copy, probabilities and sorted copy.
LOGIT_BYTES = 2 + 4 + 4 + 4
RISKY_UTILIZATION = 0.95  # at 0.95, an engine with several adapters occasionally runs out of memory
# Chat runs 64 to 256 sequences; with more, the time per output token grows.
MOST_CHAT_SEQS = 256
SEQS_STEP = 8
# Candidates: 8,192 on an A10G, up to 16,384 for chat on larger cards; longer steps delay running answers.
BATCHED_TOKENS = (16_384, 8_192, 4_096, 2_048)
DEFAULT_BATCHED_TOKENS = 8_192
# A step's activations may take at most this fraction (1/16) of the budget; otherwise steps should be shorter.
# Chosen so that the result on an A10G is 8,192.
ACTIVATION_PART = 16


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A model, a GPU, the engine's settings, and a typical request.

    Args:
        utilization: share of the GPU's memory that the engine may have.
        shared_prefix_tokens: prompt tokens that all requests have in common; cached once.
        max_num_batched_tokens: as configured; None for 8,192, or one token per sequence if that is more.
        kv_item_bytes: bytes of a cached number (1 with an FP8 cache); None for the size of an activation.
    """

    model: ModelShape
    gpu: Gpu
    utilization: float = 0.92
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    max_model_len: int = 4096
    block_size: int = 16
    prompt_tokens: int = 960
    answer_tokens: int = 140
    shared_prefix_tokens: int = 0
    max_num_seqs: int = 128
    max_num_batched_tokens: int | None = None
    max_loras: int = 0
    max_lora_rank: int = 64
    kv_item_bytes: int | None = None
    cuda_graphs: bool = True

    @property
    def context_tokens(self) -> int:
        """Tokens of a typical request, prompt and complete answer."""
        return self.prompt_tokens + self.answer_tokens

    @property
    def batched_tokens(self) -> int:
        """Tokens of the largest step."""
        return self.max_num_batched_tokens or max(DEFAULT_BATCHED_TOKENS, self.max_num_seqs)


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The result; bytes are per GPU, ``sequences`` counts typical requests with complete answers."""

    request: PlanRequest
    budget_bytes: int
    weights_bytes: int
    lora_bytes: int
    activation_bytes: int
    logits_bytes: int
    runtime_bytes: int
    kv_bytes: int
    token_bytes: int
    blocks: int
    sequences: int
    full_sequences: int
    recommended_max_num_seqs: int = 0
    recommended_max_num_batched_tokens: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens that fit into the KV cache."""
        return self.blocks * self.request.block_size

    @property
    def workspace_bytes(self) -> int:
        """Memory that is neither for weights nor adapters nor the KV cache."""
        return self.activation_bytes + self.logits_bytes + self.runtime_bytes


def plan_engine(request: PlanRequest) -> EnginePlan:
    """Divide the memory of a GPU.

    Raises PlanError: the settings contradict each other, or the engine would refuse them.
    """
    _check(request)
    plan = _divide(request)
    tokens = _recommended_tokens(request, plan.budget_bytes)
    seqs = _recommended_seqs(replace(request, max_num_batched_tokens=tokens))
    plan = replace(plan, recommended_max_num_seqs=seqs, recommended_max_num_batched_tokens=tokens)
    return replace(plan, warnings=tuple(_warnings(plan)))


def _divide(request: PlanRequest) -> EnginePlan:
    model, gpus = request.model, request.tensor_parallel
    layers = -(-model.num_layers // request.pipeline_parallel)
    kv_heads = max(1, model.num_kv_heads // gpus)
    budget = int(request.gpu.memory_bytes * request.utilization)
    weights = _weights(request)
    lora = (
        request.max_loras * request.max_lora_rank * model.lora_parameters_per_rank * layers * model.item_bytes
    ) // gpus
    # The peak of a layer: gate and up, their product, and three copies of the hidden state.
    widest = 3 * model.intermediate_size // gpus + 3 * model.hidden_size
    activations = request.batched_tokens * widest * model.item_bytes
    logits = request.max_num_seqs * model.vocab_size * LOGIT_BYTES
    runtime = RUNTIME_BYTES + (CUDA_GRAPH_BYTES if request.cuda_graphs else 0)
    kv = max(0, budget - weights - lora - activations - logits - runtime)
    token = 2 * layers * kv_heads * model.head_dim * (request.kv_item_bytes or model.item_bytes)
    block = token * request.block_size
    blocks = kv // block
    return EnginePlan(
        request=request,
        budget_bytes=budget,
        weights_bytes=weights,
        lora_bytes=lora,
        activation_bytes=activations,
        logits_bytes=logits,
        runtime_bytes=runtime,
        kv_bytes=kv,
        token_bytes=token,
        blocks=blocks,
        sequences=_sequences(blocks, request, request.context_tokens),
        full_sequences=_sequences(blocks, request, request.max_model_len),
    )


def _weights(request: PlanRequest) -> int:
    """Weights of the GPU with the most: first and last pipeline stage have one vocabulary matrix each."""
    model, stages = request.model, request.pipeline_parallel
    if model.weights_bytes is not None:
        return -(-model.weights_bytes // (stages * request.tensor_parallel))
    layers = -(-model.num_layers // stages)
    matrices = 1 if model.tie_embeddings or stages > 1 else 2
    linear = int(layers * model.layer_parameters * LINEAR_BYTES[model.weights_format])
    vocabulary = matrices * model.embedding_parameters * model.item_bytes
    norms = (2 * layers + 1) * model.hidden_size * model.item_bytes
    return (linear + vocabulary) // request.tensor_parallel + norms


def _sequences(blocks: int, request: PlanRequest, context: int) -> int:
    """How many sequences of ``context`` tokens fit; the blocks of a shared prefix count once."""
    shared = min(request.shared_prefix_tokens, context) // request.block_size
    own = max(1, -(-context // request.block_size) - shared)
    return max(0, blocks - shared) // own


def _recommended_tokens(request: PlanRequest, budget: int) -> int:
    for tokens in BATCHED_TOKENS:
        step = _divide(replace(request, max_num_batched_tokens=tokens)).activation_bytes
        if step * ACTIVATION_PART <= budget:
            return tokens
    return BATCHED_TOKENS[-1]


def _recommended_seqs(request: PlanRequest) -> int:
    """The most sequences that run together without preemption, with room for their logits."""
    tried = chain(range(MOST_CHAT_SEQS, 0, -SEQS_STEP), range(SEQS_STEP - 1, 0, -1))
    return next((n for n in tried if _divide(replace(request, max_num_seqs=n)).sequences >= n), 0)


def _warnings(plan: EnginePlan) -> list[str]:
    asked, reported = plan.request, []
    needed = -(-asked.max_model_len // asked.block_size)
    seqs, context, tokens = asked.max_num_seqs, asked.context_tokens, asked.batched_tokens
    if plan.blocks < needed:
        reported.append(
            f"one sequence of max_model_len {asked.max_model_len:,} needs {needed:,} blocks, {plan.blocks:,} "
            "fit: the engine refuses to start; shorten it, quantize the weights or share them between GPUs"
        )
    elif seqs > plan.sequences:
        reported.append(
            f"max_num_seqs {seqs} is more than the {plan.sequences} sequences of {context:,} tokens that "
            "fit: under full load the engine preempts some and computes them again"
        )
    elif seqs * 2 <= min(plan.recommended_max_num_seqs, plan.sequences):
        reported.append(f"max_num_seqs {seqs} is half of what fits or less: requests wait and memory is free")
    if asked.utilization > RISKY_UTILIZATION:
        reported.append(
            f"gpu_memory_utilization {asked.utilization:g} is above {RISKY_UTILIZATION}: peaks may not fit"
        )
    if tokens < asked.prompt_tokens:
        reported.append(
            f"max_num_batched_tokens {tokens:,} is shorter than a typical prompt: it takes several steps"
        )
    return reported


def _check(request: PlanRequest) -> None:
    model, context = request.model, request.context_tokens
    if not 0 < request.utilization <= 1:
        raise PlanError(f"gpu_memory_utilization {request.utilization:g} is not in (0, 1]")
    if context > request.max_model_len:
        raise PlanError(
            f"prompt and answer are {context:,} tokens, engine.max_model_len is {request.max_model_len:,}"
        )
    if request.max_model_len > model.max_position:
        raise PlanError(
            f"engine.max_model_len {request.max_model_len:,} is more than the {model.max_position:,} "
            f"positions of {model.name}"
        )
    if model.num_heads % request.tensor_parallel:
        raise PlanError(
            f"{model.num_heads} heads cannot be shared by {request.tensor_parallel} GPUs; "
            "engine.tensor_parallel_size must divide them"
        )
    if request.pipeline_parallel > model.num_layers:
        raise PlanError(
            f"{model.num_layers} layers do not make {request.pipeline_parallel} stages "
            "(engine.pipeline_parallel_size)"
        )
    if request.batched_tokens < request.max_num_seqs:
        raise PlanError(
            f"engine.max_num_batched_tokens {request.batched_tokens:,} is less than engine.max_num_seqs "
            f"{request.max_num_seqs:,}: a step must have a token for each sequence"
        )
