"""What does a request cost the gateway, by what it asks and how the gateway is configured?

    python -m benchmarks.shape_cost
    python -m benchmarks.shape_cost --only plain,agent --rounds 3 --realtime

Each shape gets a gateway of its own, in front of a worker that answers as vLLM does. The figure is the
gateway's CPU a request, and how it compares with a plain chat's. Other benchmarks measure one shape; here one
that costs many times as much as the plain chat shows that work is done anew for each request.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import psutil
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.forwarding.gateways import KEY, Name, python_module, recipe
from benchmarks.forwarding.processes import Cores, ask, free_port, started, wait_until_ready
from benchmarks.forwarding.workload import MODEL, Regime, bodies
from ops.replay.text import WORDS

CONVERSATIONS = 16
WARM_UP = 300
LONG_PROMPT_WORDS = 6_000
TURNS = 20
Body = dict[str, Any]
Ids = Mapping[int, str]  # a stored response of each conversation, to continue


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of request.

    ``make`` returns the body of a conversation's next request; ``turns`` responses are stored for it before.
    """

    title: str
    make: Callable[[int, str, Ids], Body]
    path: str = "/v1/chat/completions"
    gateway: Name = Name.SLUICE_RELAXED
    limits: Mapping[str, int] = field(default_factory=dict)
    turns: int = 0


def words(seed: object, number: int) -> str:
    return " ".join(random.Random(str(seed)).choices(WORDS, k=number))


def _chats(regime: Regime, *, stream: bool = False) -> list[Body]:
    made = bodies(regime, stream=stream, seed="shapes")
    return [json.loads(next(made)[0]) for _ in range(CONVERSATIONS)]


_PLAIN = _chats(Regime.CONVERSATION)
_AGENT = _chats(Regime.AGENT)


def chat(number: int, ticket: str, _: Ids, of: list[Body] = _PLAIN, **fields: object) -> Body:
    *earlier, last = of[number]["messages"]
    content = last["content"].rsplit(" ", 1)[0]
    return {**of[number], "messages": [*earlier, {**last, "content": f"{content} {ticket}"}], **fields}


def agent(number: int, ticket: str, ids: Ids) -> Body:
    return chat(number, ticket, ids, _AGENT)


def long_system(number: int, ticket: str, ids: Ids) -> Body:
    body = chat(number, ticket, ids)
    system = f"Today is 2026-11-29. {words('system', LONG_PROMPT_WORDS)}"
    return {**body, "messages": [{"role": "system", "content": system}, *body["messages"][1:]]}


def messages(number: int, ticket: str, ids: Ids) -> Body:
    system, *turns = chat(number, ticket, ids)["messages"]
    return {"model": MODEL, "max_tokens": 140, "system": system["content"], "messages": turns}


def response(number: int, ticket: str, ids: Ids) -> Body:
    system, *turns = chat(number, ticket, ids)["messages"]
    asked = {"model": MODEL, "max_output_tokens": 140, "instructions": system["content"]}
    if number not in ids:
        return {**asked, "input": turns}
    return {**asked, "input": f"{words(ticket, 30)} ticket {ticket}", "previous_response_id": ids[number]}


_MINUTE = {"requests_per_minute": 10**7, "tokens_per_minute": 10**11}
SHAPES = {
    "plain": Shape("chat, 2,000 tokens", chat),
    "stream": Shape("streamed", lambda *at: chat(*at, stream=True)),
    "long-system": Shape("system message of 45 KB with a date", long_system),
    "agent": Shape("10 tools, 20 calls, 45 KB", agent),
    "pool": Shape("two workers", chat, gateway=Name.SLUICE_POOL),
    "limits": Shape("key with limits", chat, limits=_MINUTE),
    "messages": Shape("Messages", messages, "/v1/messages"),
    "response": Shape("Responses, not stored", lambda *at: response(*at) | {"store": False}, "/v1/responses"),
    "stored": Shape("Responses, stored", response, "/v1/responses"),
    "continued": Shape(f"Responses, continues {TURNS}", response, "/v1/responses", turns=TURNS),
}


async def send(url: str, shape: Shape, key: str, requests: int, in_flight: int, ids: Ids) -> None:
    """Send requests. Raises RuntimeError for a refusal."""
    numbers = iter(range(requests))
    tickets = count(random.getrandbits(48))

    async def caller(client: aiohttp.ClientSession) -> None:
        for number in numbers:
            at = number % CONVERSATIONS
            async with client.post(url, json=shape.make(at, f"{next(tickets):x}", ids)) as answer:
                data = await answer.read()
            if answer.status != 200:
                raise RuntimeError(f"{shape.title}: {answer.status} {data[:200]!r}")

    headers = {"authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers) as client, asyncio.TaskGroup() as callers:
        for _ in range(in_flight):
            callers.create_task(caller(client))


def measure(shape: Shape, cores: Cores, requests: int, in_flight: int) -> float:
    """Return the gateway's CPU a request, in milliseconds."""
    with tempfile.TemporaryDirectory(prefix="shapes-") as place:
        folder, worker_port, port = Path(place), free_port(), free_port()
        how = recipe(shape.gateway, folder=folder, port=port, worker_port=worker_port)
        worker = python_module("benchmarks.forwarding.worker", worker_port, "--tokenizer", "models/demo")
        logs = folder / "worker.log", folder / "gateway.log"
        with (
            started((*cores.worker, *worker), logs[0]) as one,
            started((*cores.gateway, *how.command), logs[1], how.environment) as gateway,
        ):
            wait_until_ready(one, worker_port, "/health", logs[0])
            wait_until_ready(gateway, port, how.ready_path or "/ready", logs[1])
            key, url = KEY, f"http://127.0.0.1:{port}{shape.path}"
            if shape.limits:
                made = ask(port, "POST", "/admin/keys", {"tenant": "acme", "limits": dict(shape.limits)})
                key = json.loads(made[1])["key"]
            ids: dict[int, str] = {}
            for _ in range(shape.turns):
                ids = asyncio.run(_turn(url, shape, key, ids))
            asyncio.run(send(url, shape, key, WARM_UP, in_flight, ids))
            process = psutil.Process(gateway.pid)
            before = sum(process.cpu_times()[:2])
            asyncio.run(send(url, shape, key, requests, in_flight, ids))
            return (sum(process.cpu_times()[:2]) - before) / requests * 1000


async def _turn(url: str, shape: Shape, key: str, ids: Ids) -> dict[int, str]:
    """Store the next turn of each conversation."""
    found = dict[int, str]()
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {key}"}) as client:
        for number in range(CONVERSATIONS):
            async with client.post(url, json=shape.make(number, "turn", ids)) as answer:
                answer.raise_for_status()
                found[number] = (await answer.json())["id"]
    return found


def main(
    only: Annotated[str | None, typer.Option(help=f"Shapes, with commas: {', '.join(SHAPES)}.")] = None,
    requests: Annotated[int, typer.Option(min=10, help="Requests of each shape in a round.")] = 1_000,
    in_flight: Annotated[int, typer.Option(min=1)] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each shape has one turn in each.")] = 2,
    realtime: Annotated[bool, typer.Option(help="Go before all else on the machine (needs root).")] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Measure the CPU of requests of several shapes."""
    names = list(SHAPES) if only is None else ["plain", *(one for one in only.split(",") if one != "plain")]
    if unknown := [name for name in names if name not in SHAPES]:
        raise typer.BadParameter(f"{', '.join(unknown)}; there are: {', '.join(SHAPES)}", param_hint="--only")
    cores, took = Cores.here(realtime=realtime), {name: list[float]() for name in names}
    for number in range(rounds):
        for name in names:
            typer.echo(f"round {number + 1} of {rounds}: {SHAPES[name].title}", err=True)
            took[name].append(measure(SHAPES[name], cores, requests, in_flight))
    medians = {name: statistics.median(each) for name, each in took.items()}
    if as_json:
        typer.echo(json.dumps({name: {"cpu_ms": each} for name, each in took.items()}))
        return
    table = Table("request", "CPU ms", "times a plain chat's")
    for name, ms in medians.items():
        table.add_row(SHAPES[name].title, f"{ms:.2f}", f"{ms / medians['plain']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
