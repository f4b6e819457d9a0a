"""The load generator, a process of its own: a job on standard input, its result on standard output, JSON.

Each caller has one connection and one request at a time. Every text is different.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from itertools import count

import orjson
import uvloop

from ops.replay.text import WORDS

TEXT_WORDS = 20


@dataclass(frozen=True, slots=True)
class VectorJob:
    """What is requested, by how many callers, and for how long."""

    port: int
    model: str
    key: str
    callers: int
    texts: int
    seconds: float
    warm_up_s: float


@dataclass(slots=True)
class VectorResult:
    """Answers within the measured time, and the seconds that each took."""

    elapsed_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def request(job: VectorJob, number: int) -> bytes:
    """The bytes of one request."""
    words = " ".join(WORDS[(number * 7 + at) % len(WORDS)] for at in range(TEXT_WORDS))
    texts = [f"{number} {at} {words}" for at in range(job.texts)]
    body = orjson.dumps({"model": job.model, "input": texts, "encoding_format": "base64"})
    head = (
        f"POST /v1/embeddings HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {job.key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, job: VectorJob, number: int
) -> str | None:
    """Send one request and read its answer; return what is wrong with it, or ``None``."""
    writer.write(request(job, number))
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length:")[1].split(b"\r\n", 1)[0])
    body = await reader.readexactly(length)
    if not head.startswith(b"HTTP/1.1 200") or body.count(b'"embedding":') != job.texts:
        return f"{head[:20]!r} {body[:300]!r}"
    return None


async def run(job: VectorJob) -> VectorResult:
    """Warm up, then measure."""
    result, numbers, began = VectorResult(), count(), time.perf_counter()
    counted, over = began + job.warm_up_s, began + job.warm_up_s + job.seconds

    async def caller() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", job.port)
        while (sent := time.perf_counter()) < over:
            fault = await ask(reader, writer, job, next(numbers))
            done = time.perf_counter()
            if fault is not None:
                result.faults.append(fault)
                break
            if counted <= done < over:
                result.latencies_s.append(done - sent)
        writer.close()

    async with asyncio.TaskGroup() as callers:
        for _ in range(job.callers):
            callers.create_task(caller())
    result.elapsed_s = job.seconds
    return result


if __name__ == "__main__":
    gc.disable()
    json.dump(asdict(uvloop.run(run(VectorJob(**json.load(sys.stdin))))), sys.stdout)
