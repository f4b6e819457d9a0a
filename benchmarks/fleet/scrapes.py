"""What one scrape of a worker costs the gateway: a real exchange over loopback, and parsing the figures."""

from __future__ import annotations

import asyncio
import socketserver
import threading
import time

from benchmarks.fleet.front import SECTION
from gateway.backends.workers.client import WorkerClient
from gateway.backends.workers.load import read_figures

# Lines of a worker's metrics besides those that the gateway reads: vLLM writes several hundred.
OTHER_LINES = 500
WARM_UP = 20


def metrics_text() -> str:
    """Return a worker's metrics, of about the length of vLLM's."""
    label = '{engine="0",model_name="llama-3-8b"}'
    lines = [
        f'vllm:request_time_seconds_bucket{{engine="0",le="{number}.0",model_name="llama-3-8b"}} {number}.0'
        for number in range(OTHER_LINES)
    ]
    return "\n".join(
        [
            *lines,
            f"vllm:num_requests_running{label} 4.0",
            f"vllm:num_requests_waiting{label} 0.0",
            f"vllm:kv_cache_usage_perc{label} 0.3",
            'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="6800"} 1.0',
            "",
        ]
    )


class _Handler(socketserver.StreamRequestHandler):
    """Answers every request on a connection with the metrics."""

    def handle(self) -> None:
        body = metrics_text().encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        while line := self.rfile.readline():
            if line == b"\r\n":
                self.wfile.write(head + body)


def scrape_us(times: int = 300) -> tuple[float, float]:
    """Return the CPU microseconds of a scrape in the calling thread: the whole scrape, and parsing alone."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            whole_s = asyncio.run(_exchanges(server.server_address[1], times))
        finally:
            server.shutdown()
            thread.join()
    text = metrics_text()
    began = time.thread_time()
    for _ in range(times):
        read_figures(text)
    return 1e6 * whole_s / times, 1e6 * (time.thread_time() - began) / times


async def _exchanges(port: int, times: int) -> float:
    client = WorkerClient(f"http://127.0.0.1:{port}/v1", SECTION, max_connections=1, connect_s=2)
    began = 0.0
    try:
        for number in range(WARM_UP + times):
            if number == WARM_UP:
                began = time.thread_time()
            answer = await client.get("/metrics", timeout_s=30)
            if read_figures(answer.body.decode()) is None:
                raise AssertionError("the figures were not found")
        return time.thread_time() - began
    finally:
        client.close()
