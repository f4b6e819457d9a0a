"""Mixed load with aborts through the real process: at the end every block is free.

Runs for ``SLUICE_SOAK_SECONDS`` (default 4), and up to 60 s longer until a first preemption; a release is
tested with 600.
"""

import asyncio
import os
import random
import time
from pathlib import Path

import pytest

from engine.client import EngineClient
from engine.errors import EngineBusy
from engine.values import EngineConfig, EngineSignals, GenerationRequest, SamplingParams, SequenceEnd

BLOCKS = 96
WORKERS = 48
LONGEST_S = 60.0


@pytest.mark.timeout(0)
async def test_mixed_load_with_aborts_ends_with_every_block_free(tiny_model: Path) -> None:
    idle = asyncio.Event()

    def note(signals: EngineSignals) -> None:
        (idle.clear if signals.running or signals.waiting else idle.set)()

    client = EngineClient(
        EngineConfig(
            str(tiny_model), num_threads=1, num_blocks=BLOCKS, max_num_seqs=24, max_num_batched_tokens=256
        ),
        on_signals=note,
    )
    await client.start()
    until = time.monotonic() + float(os.environ.get("SLUICE_SOAK_SECONDS", "4"))
    ended: dict[str, int] = {"finished": 0, "left": 0, "busy": 0}

    def going() -> bool:
        now, signals = time.monotonic(), client.signals
        return now < until or (now < until + LONGEST_S and (signals is None or not signals.preemptions))

    async def worker(number: int) -> None:
        rng = random.Random(number)
        count = 0
        while going():
            count += 1
            request = GenerationRequest(
                f"{number}-{count}",
                tuple(rng.randrange(3, 512) for _ in range(int(rng.paretovariate(1.2) * 10) % 700 + 1)),
                SamplingParams(
                    rng.randint(1, 120),
                    temperature=rng.choice((0.0, 0.7, 1.3)),
                    top_p=rng.choice((1.0, 0.9)),
                    top_k=rng.choice((0, 20)),
                    stop=rng.choice(((), ("a", "filler"))),
                    ignore_eos=rng.random() < 0.5,
                ),
            )
            patience = rng.choice((0, 1, 5, 1_000_000, 1_000_000))
            try:
                with client.submit(request) as ticket:
                    tokens = 0
                    while tokens < patience:
                        output = await ticket.receive()
                        tokens += len(output.token_ids)
                        if output.finish_reason is not None:
                            assert output.finish_reason in (SequenceEnd.STOP, SequenceEnd.LENGTH)
                            assert tokens == output.output_tokens
                            ended["finished"] += 1
                            break
                    else:
                        ended["left"] += 1
            except EngineBusy:
                ended["busy"] += 1
            await asyncio.sleep(rng.random() * 0.01)

    async with asyncio.TaskGroup() as workers:
        for number in range(WORKERS):
            workers.create_task(worker(number))

    async with asyncio.timeout(60):
        await idle.wait()
    signals = client.signals
    assert signals is not None
    await client.stop()
    assert (signals.kv_usage, signals.total_blocks) == (0, BLOCKS)
    assert signals.preemptions > 0
    assert ended["finished"] > 0
    assert ended["left"] > 0
