"""Builds an engine from its configuration."""

import logging
import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer

from engine.attention import DecodeKernel, GroupedAttention
from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.errors import EngineStartError
from engine.kv_pool import ACTIVATION_BYTES, compute_kv_pool_size
from engine.loader import read_config, read_tokenizer, read_weights, resolve_device, resolve_dtype
from engine.lora import AdapterBank
from engine.lora_loader import read_adapter
from engine.memory import tells_of_no_memory
from engine.model import Decoder, ModelConfig, ModelWeights
from engine.operators import Operators
from engine.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.structured import Grammars
from engine.threads import StepThreads
from engine.values import GIB, EngineConfig, EngineInfo

CPU_KV_BYTES = GIB
_log = logging.getLogger(__name__)


def build_engine(config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> Engine:
    """Load the model and make an engine. Raises an EngineStartError with a message of one line."""
    started_at = clock()
    # One thread per core, at most eight; one core is left to the gateway.
    torch.set_num_threads(config.num_threads or max(1, min(8, (os.cpu_count() or 1) - 1)))
    folder = Path(config.model)
    model = read_config(folder)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, model, device)
    num_blocks = pool_blocks(config, model, device, dtype.itemsize)
    tokenizer = read_tokenizer(folder)
    try:
        weights = read_weights(folder, model, dtype, device)
        engine = assemble(config, model, weights, tokenizer, num_blocks, clock, started_at)
    except (MemoryError, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not tells_of_no_memory(error):
            raise
        raise EngineStartError(f"no memory for {folder} with {num_blocks} KV blocks: {error}") from error
    info = engine.info
    _log.info(
        "%s (%s, %d parameters) on %s in %s: %d KV blocks of %d tokens; %d tokens a request",
        *(folder, info.architecture, info.parameters, info.device, info.dtype),
        *(num_blocks, info.block_size, info.max_model_len),
    )
    return engine


def assemble(
    config: EngineConfig,
    model: ModelConfig,
    weights: ModelWeights,
    tokenizer: Tokenizer,
    num_blocks: int,
    clock: Callable[[], float],
    started_at: float,
) -> Engine:
    """Make an engine with these weights, on their device and in their dtype."""
    dtype, device = weights.embedding.dtype, weights.embedding.device
    max_model_len = min(config.max_model_len, model.max_position, num_blocks * config.block_size)
    operators, attention = _choose_operators(config, model, dtype, device)
    read = partial(read_adapter, config=model, max_rank=config.max_lora_rank, dtype=dtype, device=device)
    adapters = AdapterBank(config.max_loras, read)
    runner = ModelRunner(
        Decoder(model, weights, max_model_len, attention, operators),
        adapters,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        fixed_decode=device.type == "cuda" and not config.enforce_eager,
        threads=StepThreads(torch.get_num_threads(), model, operators) if device.type == "cpu" else None,
    )
    pool = BlockPool(num_blocks, config.block_size)
    info = EngineInfo(
        model=config.model,
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=model.eos_token_ids,
        block_size=config.block_size,
        total_blocks=num_blocks,
        max_requests=config.max_num_seqs + config.max_waiting,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        parameters=model.num_parameters,
        load_s=clock() - started_at,
    )
    scheduler = Scheduler(
        pool,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        prefix_caching=config.enable_prefix_caching,
    )
    return Engine(
        info=info,
        pool=pool,
        scheduler=scheduler,
        runner=runner,
        tokenizer=tokenizer,
        grammars=Grammars(tokenizer, info.vocab_size, info.eos_token_ids),
        clock=clock,
        seeds=random.Random(config.seed),
        adapters=adapters,
    )


def _choose_operators(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[Operators, GroupedAttention]:
    """The operators and the attention for this device and dtype; none compiled with ``enforce_eager``."""
    heads = (model.num_heads, model.num_kv_heads, model.head_dim)
    operators: Operators = Operators(*heads, model.rms_norm_eps)
    kernel: DecodeKernel | None = None
    if device.type == "cuda":
        # cuDNN builds a plan of 0.1 s and more for each new shape, and each prompt has a new shape. A plan
        # that was built while memory was short stays broken.
        torch.backends.cuda.enable_cudnn_sdp(False)
    if device.type == "cuda" and not config.enforce_eager:
        try:
            from engine.fused import FusedOperators
        except ImportError as error:
            _log.warning("Triton is missing, so PyTorch's operators run, which are slower: %s", error)
        else:
            operators = kernel = FusedOperators(*heads, model.rms_norm_eps, block_size=config.block_size)
    elif device.type == "cpu" and dtype is torch.float32 and not config.enforce_eager:
        try:
            from engine.kernels import CompiledOperators
        except ImportError as error:
            _log.warning("Numba is missing, so PyTorch's operators run, which are slower: %s", error)
        else:
            operators = kernel = CompiledOperators(
                *heads, model.rms_norm_eps, block_size=config.block_size, threads=torch.get_num_threads()
            )
            operators.compile_parallel()
    return operators, GroupedAttention(
        *heads, block_size=config.block_size, dtype=dtype, device=device, kernel=kernel
    )


def pool_blocks(config: EngineConfig, model: ModelConfig, device: torch.device, item_bytes: int) -> int:
    """The number of KV blocks; logs its arithmetic. Raises InvalidConfig when not even one fits.

    If the configuration has neither a number nor a size, the blocks get the GPU memory that is free and not
    needed for weights and activations; on the CPU, whose memory is shared, ``CPU_KV_BYTES``.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    if config.kv_cache_bytes is None and device.type == "cuda":
        memory, utilization = torch.cuda.mem_get_info(device)[0], config.gpu_memory_utilization
        weights, activations = None, ACTIVATION_BYTES
    else:
        memory, utilization, weights, activations = config.kv_cache_bytes or CPU_KV_BYTES, 1.0, 0, 0
    size = compute_kv_pool_size(
        memory,
        model,
        item_bytes=item_bytes,
        block_size=config.block_size,
        utilization=utilization,
        weights_bytes=weights,
        activation_bytes=activations,
    )
    for line in size.arithmetic:
        _log.info("KV pool, %s", line)
    return size.num_blocks
