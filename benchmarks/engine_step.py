"""What the compiled loops save: the engine's CPU time per token with them and with ``enforce_eager``.

    python -m benchmarks.engine_step

Both engines run in this process, in turn, on the same jobs as ``engine_vs_vllm``, without clients. CPU time
is measured, not wall time, so the figures hold on a shared machine too. Shown are medians over the rounds.
"""

import statistics
import time
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.engine_driver import Job, Setup
from benchmarks.engine_vs_vllm import MIB, REPOSITORY, make_job
from engine.build import build_engine
from engine.engine import Engine
from engine.values import EngineConfig, GenerationRequest, SamplingParams

BLOCK_SIZE, MAX_SEQS, MAX_LEN, KV_BYTES = 32, 64, 2048, 512 * MIB


def cpu_ms_per_token(engine: Engine, job: Job) -> float:
    """Run the job with ``job.concurrency`` requests in flight; return the CPU milliseconds per token."""
    waiting = iter(enumerate(zip(job.prompts, job.output_tokens, strict=True)))

    def add() -> None:
        if (one := next(waiting, None)) is not None:
            number, (prompt, wanted) = one
            sampling = SamplingParams(wanted, temperature=0.0, ignore_eos=True)
            engine.add(GenerationRequest(str(number), tuple(prompt), sampling))

    for _ in range(job.concurrency):
        add()
    started_at = time.process_time()
    while engine.has_work:
        for output in engine.step():
            if output.finish_reason is not None:
                add()
    return (time.process_time() - started_at) * 1e3 / sum(job.output_tokens)


def main(
    model: Annotated[Path, typer.Option(help="The model's folder.")] = REPOSITORY / "models" / "demo",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each engine runs once in each.")] = 3,
    concurrencies: Annotated[str, typer.Option(help="Streams at once, with commas.")] = "1,8,32,64",
    threads: Annotated[int, typer.Option(min=1, help="Threads of each engine.")] = 1,
) -> None:
    """Print CPU milliseconds per token with and without the compiled loops, and their ratio."""
    setup = Setup(str(model), "float32", MAX_LEN, BLOCK_SIZE, MAX_SEQS, 1024, KV_BYTES, True, threads)
    engines = [
        build_engine(
            EngineConfig(
                str(model),
                max_model_len=MAX_LEN,
                block_size=BLOCK_SIZE,
                max_num_seqs=MAX_SEQS,
                kv_cache_bytes=KV_BYTES,
                num_threads=threads,
                enforce_eager=eager,
            )
        )
        for eager in (False, True)
    ]
    vocabulary = engines[0].info.vocab_size
    for count in map(int, concurrencies.split(",")):
        times: list[list[float]] = [[], []]
        for number in range(-1, rounds):  # the first round warms both up and is not counted
            job = make_job(count, 48, setup, 0.25, vocabulary, f"{count} {number}")
            for engine, into in zip(engines, times, strict=True):
                spent = cpu_ms_per_token(engine, job)
                if number >= 0:
                    into.append(spent)
        compiled, eager = map(statistics.median, times)
        print(
            f"{count:3} streams: {compiled:.3f} ms a token, eager {eager:.3f}: {compiled / eager:.2f} times"
        )


if __name__ == "__main__":
    typer.run(main)
