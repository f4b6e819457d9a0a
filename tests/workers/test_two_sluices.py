"""Two Sluices as the workers of a third, in their default form: one is killed, and its streams are resumed."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest

from tests.integration.live import ADMIN_KEY, LiveGateway, gateway

QUESTIONS = [
    f"Which manga about {topic} do you have? List them with their authors and volumes."
    for topic in ("samurai", "cooking", "sports", "magic")
] + [f"{topic}の漫画を全部、詳しく教えてください。" for topic in ("侍", "料理", "野球", "魔法")]
STREAMS = 16
# Pieces that a caller has read before a worker is killed.
PIECES = 4


async def ask(client: openai.AsyncOpenAI, number: int, begun: asyncio.Semaphore | None = None) -> str:
    stream = await client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}],
        max_tokens=64,
        temperature=0,
        stream=True,
    )
    text, pieces = "", 0
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            text, pieces = text + chunk.choices[0].delta.content, pieces + 1
            if begun is not None and pieces == PIECES:
                begun.release()
    return text


def tokens_of(worker: LiveGateway) -> float:
    return worker.metric("vllm:generation_tokens_total")


async def kill_during_streams(front: LiveGateway, victim: LiveGateway) -> tuple[list[str], list[str]]:
    """The answers without a kill, and those during which ``victim`` is killed.

    The first streams that begin may all be the other worker's, so the victim's own tokens are counted too.
    """
    async with openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key=ADMIN_KEY, max_retries=0) as client:
        whole = [await ask(client, number) for number in range(len(QUESTIONS))]
        begun, before = asyncio.Semaphore(0), await asyncio.to_thread(tokens_of, victim)
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(ask(client, number, begun)) for number in range(STREAMS)]
            for _ in range(STREAMS // 2):
                await begun.acquire()
            async with asyncio.timeout(240):
                while await asyncio.to_thread(tokens_of, victim) < before + STREAMS // 4 * PIECES:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            victim.process.send_signal(signal.SIGKILL)
    return whole, [task.result() for task in asked]


@pytest.mark.slow
def test_every_stream_of_a_killed_sluice_is_resumed_exactly_by_the_other_one(tmp_path: Path) -> None:
    with ExitStack() as stack:
        workers = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            workers.append(stack.enter_context(gateway(tmp_path / name)))
        urls = [f"{worker.url}/v1" for worker in workers]
        (tmp_path / "routing.yaml").write_text(
            "routes: {main: {backends: [{name: pool, weight: 100}], fallback: []}}\n"
        )
        (tmp_path / "sluice.yaml").write_text(
            "engine: {kind: none, tokenizer: models/demo, served_model_name: demo}\n"
            "backends: {pool: {kind: openai, model: demo, api_key_env: SLUICE_ADMIN_KEY,"
            # On a busy machine the other worker may take longer than the default, 2 s, to accept or be probed.
            f" connect_timeout_seconds: 30, probe_timeout_seconds: 30, base_urls: {urls}}}}}\n"
            f"routing: {{file: {tmp_path}/routing.yaml}}\n"
        )
        front = stack.enter_context(gateway(tmp_path, config=tmp_path / "sluice.yaml"))
        deadline = time.monotonic() + 120
        while front.metric("sluice_worker_in_service") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        whole, asked = asyncio.run(kill_during_streams(front, workers[0]))
        assert asked == [whole[number % len(QUESTIONS)] for number in range(STREAMS)]
        assert front.metric("sluice_resumed_streams_total") >= 1
