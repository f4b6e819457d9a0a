"""A minimal Python gateway: FastAPI as the server, aiohttp as the client, and no logic between them.

python -m benchmarks.forwarding.proxy PORT WORKER_PORT
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

port, worker_port = map(int, sys.argv[1:])


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Keep one client session open."""
    async with aiohttp.ClientSession(
        f"http://127.0.0.1:{worker_port}", connector=aiohttp.TCPConnector(limit=0)
    ) as app.state.session:
        yield


app = FastAPI(lifespan=lifespan)


@app.api_route("/v1/{path:path}", methods=["GET", "POST"])
async def forward(request: Request) -> Response:
    """Forward the request, and return the worker's answer: whole, or as a stream."""
    answer = await request.app.state.session.request(
        request.method, request.url.path, data=await request.body(),
        headers={"content-type": "application/json"},
    )  # fmt: skip
    if answer.content_type != "text/event-stream":
        return Response(await answer.read(), answer.status, media_type=answer.content_type)
    return StreamingResponse(answer.content.iter_any(), answer.status, media_type=answer.content_type)


if __name__ == "__main__":
    uvicorn.run(app, port=port, loop="uvloop", http="httptools", access_log=False, log_level="warning")
