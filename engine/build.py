"""From a configuration to an engine: read the checkpoint, size the pool, put the parts together."""

import logging
import os
import random
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import torch

from engine.block_pool import BlockPool
from engine.engine import Engine
from engine.errors import EngineStartError, InvalidConfig
from engine.loader import read_config, read_tokenizer, read_weights, resolve_device, resolve_dtype
from engine.model import LlamaModel, ModelConfig
from engine.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.values import EngineConfig, EngineInfo

_log = logging.getLogger(__name__)


def build_engine(config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> Engine:
    """Loads the model and makes an engine. Raises an EngineStartError that says in one line what is wrong."""
    started_at = clock()
    _check_config(config)
    torch.set_num_threads(config.num_threads or default_threads())
    folder = Path(config.model)
    model_config = read_config(folder)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, model_config, device)
    token_bytes = model_config.kv_bytes_per_token(dtype.itemsize)
    num_blocks = pool_blocks(config, token_bytes)
    max_model_len = min(config.max_model_len, model_config.max_position, num_blocks * config.block_size)
    tokenizer = read_tokenizer(folder)
    try:
        weights = read_weights(folder, model_config, dtype, device)
        model = LlamaModel(model_config, weights, max_model_len)
        runner = ModelRunner(
            model,
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
        )
    except (MemoryError, OSError, torch.OutOfMemoryError) as error:
        raise EngineStartError(f"no memory for {folder} with {num_blocks} KV blocks: {error}") from error
    pool = BlockPool(num_blocks, config.block_size)
    info = EngineInfo(
        model=config.model,
        architecture=model_config.architecture,
        vocab_size=model_config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=model_config.eos_token_ids,
        block_size=config.block_size,
        total_blocks=num_blocks,
        kv_bytes_per_token=token_bytes,
        max_requests=config.max_num_seqs + config.max_waiting,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        parameters=count_parameters(model_config),
        load_s=clock() - started_at,
    )
    _log.info(
        "%s on %s in %s: KV %d bytes a token x %d a block x %d blocks = %.2f GiB; %d tokens a request",
        folder,
        info.device,
        info.dtype,
        token_bytes,
        config.block_size,
        num_blocks,
        token_bytes * config.block_size * num_blocks / 1024**3,
        max_model_len,
    )
    return Engine(
        info=info,
        pool=pool,
        scheduler=Scheduler(
            pool, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens
        ),
        runner=runner,
        tokenizer=tokenizer,
        clock=clock,
        seeds=random.Random(config.seed),
    )


def pool_blocks(config: EngineConfig, kv_bytes_per_token: int) -> int:
    """How many blocks the pool has. Raises InvalidConfig when not even one fits."""
    if config.num_blocks is not None:
        return config.num_blocks
    blocks = config.kv_cache_bytes // (kv_bytes_per_token * config.block_size)
    if blocks < 1:
        raise InvalidConfig(
            f"kv_cache_bytes {config.kv_cache_bytes} is less than one block "
            f"of {config.block_size} tokens at {kv_bytes_per_token} bytes"
        )
    return blocks


def default_threads() -> int:
    """One thread a core, at most eight; one core stays free for the process that serves the clients."""
    return max(1, min(8, (os.cpu_count() or 1) - 1))


def count_parameters(config: ModelConfig) -> int:
    """Weights of the model, from its shape; tied embeddings count once."""
    attention = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    layer = attention + 3 * config.hidden_size * config.intermediate_size + 2 * config.hidden_size
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
    return config.num_layers * layer + embeddings + config.hidden_size


def _check_config(config: EngineConfig) -> None:
    for field in fields(config):
        value = getattr(config, field.name)
        least = {"seed": None, "max_waiting": 0}.get(field.name, 1)
        if isinstance(value, int) and least is not None and value < least:
            raise InvalidConfig(f"{field.name} must be at least {least}, not {value}")
