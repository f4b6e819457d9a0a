"""Does a stored response get lost? Two gateways on one database, one of them killed every few seconds.

    python -m benchmarks.responses_kill                   # 100 kills over a PostgreSQL
    python -m benchmarks.responses_kill --kills 10 --database sqlite

Callers of two tenants request responses from both gateways: whole, streamed, in the background, and both.
After the last kill, every acknowledged response is read: one with an end must be stored as it was sent, one
in the background must have an end and a stream from any event on, and the other tenant must see none.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import aiohttp
import typer
from rich.console import Console

from benchmarks.forwarding.processes import free_port
from benchmarks.ledger_kill import KEY, PAUSE_S, Gateway, configure, keep_killing, ready, worker
from benchmarks.ledger_postgres import postgres
from benchmarks.ledger_worker import MODEL
from benchmarks.sse import json_events

TOKEN_S: Final = 0.2
"""Seconds that each token of the worker takes, so that most kills hit responses that are running."""
END_S: Final = 120.0
"""Longest wait for the end of a background response, in seconds: leases expire after 15 s."""
KINDS: Final = ("whole", "streamed", "background", "followed")


@dataclass(frozen=True, slots=True)
class Acked:
    """An acknowledged response: its last state, and the events that the caller received."""

    kind: str
    tenant: str
    response: dict[str, Any]
    events: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """What became of the responses; the numbers from ``lost`` to ``inexact`` must be 0."""

    kills: int
    acknowledged: dict[str, int]
    unacknowledged: int
    lost: int
    different: int
    endless: int
    foreign: int
    inexact: int
    ends: dict[str, int]
    seconds: float

    @property
    def good(self) -> bool:
        """Return whether nothing was lost, shown to another tenant, or stored differently than sent."""
        return not (self.lost or self.different or self.endless or self.foreign or self.inexact)


@dataclass
class Callers:
    """What the callers received."""

    acked: list[Acked] = field(default_factory=list)
    unacknowledged: int = 0


async def ask(session: aiohttp.ClientSession, url: str, kind: str, tenant: str, key: str) -> Acked | None:
    """Request one response; return what was received, or ``None`` when nothing was acknowledged."""
    streams = kind in ("streamed", "followed")
    body = {"model": MODEL, "input": "What now?", "stream": streams, "background": kind in KINDS[2:]}
    events: list[dict[str, Any]] = []
    response: dict[str, Any] | None = None
    with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with session.post(f"{url}/v1/responses", json=body, headers=bearer(key)) as answer:
            if answer.status != 200:
                return None
            if not streams:
                response = await answer.json()
            else:
                async for event in json_events(answer.content.iter_any()):
                    events.append(event)  # noqa: PERF401 - what came before a break counts
    if events and (kind == "followed" or events[-1]["type"] == "response.completed"):
        response = events[-1].get("response") or events[0]["response"]
    return None if response is None else Acked(kind, tenant, response, tuple(events))


def bearer(key: str) -> dict[str, str]:
    """Return the authorization header of a key."""
    return {"authorization": f"Bearer {key}"}


async def keep_asking(
    session: aiohttp.ClientSession,
    urls: list[str],
    keys: dict[str, str],
    callers: Callers,
    rng: random.Random,
) -> None:
    """Request one kind after the other, each at a random gateway."""
    while True:
        for kind in rng.sample(KINDS, len(KINDS)):
            tenant = rng.choice(list(keys))
            acked = await ask(session, rng.choice(urls), kind, tenant, keys[tenant])
            if acked is None:
                callers.unacknowledged += 1
                await asyncio.sleep(PAUSE_S)
            else:
                callers.acked.append(acked)


async def found(session: aiohttp.ClientSession, url: str, acked: Acked, key: str) -> dict[str, Any] | None:
    """Return the stored response once it has an end; ``None`` when there is none."""
    until = time.perf_counter() + END_S
    while True:
        async with session.get(f"{url}/v1/responses/{acked.response['id']}", headers=bearer(key)) as answer:
            if answer.status == 404:
                return None
            shown: dict[str, Any] = await answer.json()
        if shown.get("status") not in ("queued", "in_progress", None) or time.perf_counter() > until:
            return shown
        await asyncio.sleep(0.5)


async def is_exact(
    session: aiohttp.ClientSession, url: str, acked: Acked, key: str, rng: random.Random
) -> bool:
    """Return whether the stream from any event on is the rest of the whole, and received events fit it."""

    async def after(number: int) -> list[dict[str, Any]]:
        asked = {"stream": "true", "starting_after": str(number)}
        path = f"{url}/v1/responses/{acked.response['id']}"
        async with session.get(path, params=asked, headers=bearer(key)) as answer:
            return [event async for event in json_events(answer.content.iter_any())]

    whole = await after(-1)
    at = rng.randrange(-1, len(whole) or 1)
    return (
        [event["sequence_number"] for event in whole] == list(range(len(whole)))
        and await after(at) == whole[at + 1 :]
        and whole[: len(acked.events)] == list(acked.events)
    )


async def checked(
    session: aiohttp.ClientSession,
    urls: list[str],
    keys: dict[str, str],
    callers: Callers,
    rng: random.Random,
) -> dict[str, Any]:
    """Check every acknowledged response."""
    wrong: Counter[str] = Counter()
    ends: Counter[str] = Counter()

    async def one(acked: Acked) -> None:
        own, other = keys[acked.tenant], next(key for name, key in keys.items() if name != acked.tenant)
        url = rng.choice(urls)
        async with session.get(f"{url}/v1/responses/{acked.response['id']}", headers=bearer(other)) as answer:
            wrong["foreign"] += answer.status != 404
        shown = await found(session, url, acked, own)
        if shown is None:
            wrong["lost"] += 1
            return
        has_end = acked.response["status"] == "completed"
        wrong["different"] += has_end and shown != acked.response
        wrong["endless"] += shown["status"] in ("queued", "in_progress")
        if acked.kind in KINDS[2:]:
            ends[f"{acked.kind}: {shown['status']}"] += 1
            if shown["status"] == "completed":
                wrong["inexact"] += not await is_exact(session, url, acked, own, rng)

    todo = iter(list(callers.acked))

    async def some() -> None:
        for acked in todo:
            await one(acked)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(8):
            tasks.create_task(some())
    names = ("lost", "different", "endless", "foreign", "inexact")
    return {**{name: wrong[name] for name in names}, "ends": dict(sorted(ends.items()))}


async def tenants_keys(session: aiohttp.ClientSession, url: str) -> dict[str, str]:
    """A key for each of two tenants."""
    keys = {}
    for tenant in ("acme", "globex"):
        async with session.post(f"{url}/admin/keys", json={"tenant": tenant}, headers=bearer(KEY)) as answer:
            keys[tenant] = (await answer.json())["key"]
    return keys


async def run(
    ledger: str, folder: Path, *, kills: int, kill_every_s: float, at_once: int, seed: int
) -> Result:
    """Run the whole benchmark once."""
    began, callers, rng = time.perf_counter(), Callers(), random.Random(seed)
    gateways = [Gateway(folder / name, free_port()) for name in ("a", "b")]
    urls = [gateway.url for gateway in gateways]
    timeout = aiohttp.ClientTimeout(total=60)
    with worker(folder, TOKEN_S) as port, contextlib.ExitStack() as ending:
        for gateway in gateways:
            gateway.folder.mkdir()
            state = f"sqlite:///{folder}/state.db"
            configure(gateway.folder, port=gateway.port, worker=port, ledger=ledger, state=state)
            gateway.start()
            ending.callback(gateway.kill, signal.SIGTERM)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            await all_ready(session, gateways)
            keys = await tenants_keys(session, urls[0])
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(keep_asking(session, urls, keys, callers, rng)) for _ in range(at_once)
                ]
                running += [
                    tasks.create_task(keep_killing(session, one, kill_every_s, rng)) for one in gateways
                ]
                while sum(gateway.kills for gateway in gateways) < kills:  # noqa: ASYNC110 - plain numbers
                    await asyncio.sleep(0.1)
                for task in running:
                    task.cancel()
            for gateway in gateways:
                if gateway.process is None:
                    gateway.start()
            await all_ready(session, gateways)
            outcome = await checked(session, urls, keys, callers, rng)
    return Result(
        kills=sum(gateway.kills for gateway in gateways),
        acknowledged=dict(sorted(Counter(acked.kind for acked in callers.acked).items())),
        unacknowledged=callers.unacknowledged,
        seconds=round(time.perf_counter() - began, 1),
        **outcome,
    )


async def all_ready(session: aiohttp.ClientSession, gateways: list[Gateway]) -> None:
    """Wait until each gateway accepts requests."""
    for gateway in gateways:
        await ready(session, gateway.url)


def main(
    kills: Annotated[int, typer.Option(min=1, help="Of either gateway.")] = 100,
    kill_every: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two kills of one, about.")
    ] = 8.0,
    at_once: Annotated[int, typer.Option(min=1, help="Callers.")] = 16,
    database: Annotated[str, typer.Option(help="postgresql or sqlite.")] = "postgresql",
    seed: Annotated[int, typer.Option(help="Of the moments of the kills.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="JSON.")] = False,
) -> None:
    """Kill, check and compare; exit code 1 when a response was lost, shown to others or changed."""
    console = Console()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as ending:
        folder = Path(name)
        server = ending.enter_context(postgres()) if database == "postgresql" else None
        url = f"sqlite+aiosqlite:///{folder}/ledger.db" if server is None else server.url
        result = asyncio.run(
            run(url, folder, kills=kills, kill_every_s=kill_every, at_once=at_once, seed=seed)
        )
    if as_json:
        print(json.dumps({**asdict(result), "good": result.good}))
    else:
        for field_name, value in asdict(result).items():
            console.print(f"{field_name:>20}  {value}", highlight=False)
    raise typer.Exit(0 if result.good else 1)


if __name__ == "__main__":
    typer.run(main)
