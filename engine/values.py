"""The engine's inputs and outputs: frozen values without torch, which are sent between processes."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from enum import StrEnum

GIB = 1024**3


class SequenceEnd(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


class GrammarKind(StrEnum):
    """The ways to specify the shape of a text."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The shape that the whole text must have. ``spec`` is empty for a JSON object, otherwise the schema as
    JSON text, the pattern (Rust's ``regex`` without look-around), the choices as a JSON array of strings, or
    the grammar (Lark, or GBNF if it has ``::=``). ``grammar_bytes`` is the memory that the grammar takes.
    """

    kind: GrammarKind
    spec: str = ""
    grammar_bytes: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the tokens of one request and when to end it.

    ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off; they apply in the order
    min-p, top-k, top-p. With a ``seed`` the tokens do not depend on the batch; without one the engine draws a
    seed. ``stop`` strings are cut from the text; a stop id stays in ``token_ids`` but has no text. In the
    first ``min_tokens`` tokens of an answer the model's end and stop ids are not sampled, and stop strings
    are not searched.

    The penalties are defined as in vLLM: ``repetition_penalty`` (1 is off) divides the positive and
    multiplies the negative logits of tokens in prompt and output; for tokens in the output
    ``presence_penalty`` is subtracted once, ``frequency_penalty`` once per occurrence (0 is off). Before that
    ``logit_bias``, pairs of token id and bias, is added. ``logprobs`` requests the log-probability of each
    token and of this many most likely ones, before bias, penalties, shape and temperature.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    structured: StructuredOutput | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to continue; ``request_id`` is unique in flight; a higher ``priority`` is more important.

    Only requests with the same ``cache_salt`` and the same adapter share cached prefixes. Tenants need salts
    of their own if the time to first token must not reveal prompts of others. ``partial_token_ids`` are the
    first tokens of the answer, from another call; this call continues as if it had sampled them. Seed,
    penalties, format and stop strings apply to the whole answer; ``sampling.max_tokens``, the output's text
    and its counts apply to the rest only.

    With ``embed`` the last hidden states of the prompt's tokens are averaged, nothing is generated, and
    ``sampling`` is ignored. Such a request neither uses the prefix cache nor adds to it.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    adapter_id: str | None = None
    partial_token_ids: tuple[int, ...] = ()
    embed: bool = False


@dataclass(frozen=True, slots=True)
class TokenIdLogprob:
    """The log-probability of a token; ``top`` has the most likely tokens as (id, logprob), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """The output of one step, or of several joined steps, for one request.

    ``text`` and ``token_ids`` are deltas; ``output_tokens`` is cumulative. ``queue_wait_s`` (arrival to first
    scheduled) is set on the output with the first token and on the last one. ``stop_reason`` is the matched
    stop string or stop id. ``error`` is a stable code when ``finish_reason`` is ERROR, ``detail`` one line
    that explains it. ``logprobs`` has an entry for each of ``token_ids`` if they were requested.
    ``embedding`` is the requested vector, of length 1, as little-endian 32-bit floats.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: SequenceEnd | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    queue_wait_s: float | None = None
    error: str | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenIdLogprob, ...] = ()
    detail: str | None = None
    embedding: bytes = b""


@dataclass(frozen=True, slots=True)
class EngineSignals:
    """The engine's state after a step: gauges, and counters since the start.

    ``waiting`` excludes texts to embed, because they delay no request. ``kv_usage`` excludes cached blocks
    that are not in use. ``prefix_queries`` counts the prompt tokens of started requests, ``prefix_hits``
    those of them that came from the cache; neither counts a start after a preemption.
    """

    running: int = 0
    waiting: int = 0
    total_blocks: int = 0
    block_size: int = 0
    kv_usage: float = 0.0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    tokens_scheduled: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to load the model and how much to run at once.

    ``dtype`` "auto" is float32 on the CPU and the checkpoint's dtype on CUDA; ``device`` "auto" is CUDA when
    there is one. ``max_model_len`` is lowered to what the model and the pool can hold. ``block_size`` 16
    wastes half a block a sequence, about 3 % at 256 tokens. ``max_num_batched_tokens`` bounds the step time,
    and so the gap that a long prompt makes between two tokens of others; on a GPU use 2,048 to 8,192. If
    ``num_blocks`` is None, ``kv_cache_bytes`` decides; if that is None too, it is 1 GiB on the CPU, and on
    CUDA the share ``gpu_memory_utilization`` of the free memory, minus weights and activations.
    ``num_threads`` None leaves one core to the gateway; small steps use one thread. ``max_waiting`` bounds
    the queue. ``seed`` seeds the generator of seeds for requests without one. Up to ``max_loras`` adapters
    (0: none), of ranks up to ``max_lora_rank``, can be loaded at once. ``enforce_eager`` disables compiled
    and captured code: Numba's loops, CUDA graphs.
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int = 4096
    block_size: int = 16
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 1024
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    num_threads: int | None = None
    max_waiting: int = 4096
    seed: int | None = None
    enable_prefix_caching: bool = True
    max_loras: int = 8
    max_lora_rank: int = 64
    enforce_eager: bool = False


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The loaded model. ``max_model_len`` is the effective limit of prompt and output tokens together."""

    model: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    total_blocks: int
    max_requests: int
    dtype: str
    device: str
    parameters: int
    load_s: float


def coalesce(request_id: str, outputs: Seq[SequenceOutput]) -> SequenceOutput:
    """Join consecutive outputs of one request (at least one, oldest first) into one output."""
    last = outputs[-1]
    if len(outputs) == 1:
        return replace(last, request_id=request_id)
    waits = [output.queue_wait_s for output in outputs if output.queue_wait_s is not None]
    return replace(
        last,
        request_id=request_id,
        text="".join([output.text for output in outputs]),
        token_ids=tuple([token for output in outputs for token in output.token_ids]),
        logprobs=tuple([entry for output in outputs for entry in output.logprobs]),
        queue_wait_s=waits[-1] if waits else None,
    )
