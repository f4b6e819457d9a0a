"""Is a line of a batch lost or billed twice? Two gateways on one database, each killed every few seconds.

    python -m benchmarks.batches_kill                     # 200 kills over a PostgreSQL
    python -m benchmarks.batches_kill --kills 10 --database sqlite

Two tenants submit batches all the time. After the last kill, every batch that a gateway lists must end with
each of its lines exactly once in the output or in the error file, and the ledger must have one row for each
line of the output, with the same tokens as in the output.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import aiohttp
import typer
import yaml
from rich.console import Console
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from benchmarks.forwarding.processes import free_port
from benchmarks.ledger_kill import PAUSE_S, Gateway, configure, keep_killing, worker
from benchmarks.ledger_postgres import postgres
from benchmarks.ledger_worker import MODEL
from benchmarks.responses_kill import all_ready, bearer, tenants_keys

TOKEN_S: Final = 0.2
"""Seconds that each token of the worker takes, so that most kills hit lines that are running."""
END_S: Final = 600.0
"""Longest wait for all batches to end, in seconds; a killed gateway's claim expires after 20 s."""
ENDED: Final = ("completed", "failed", "expired", "cancelled")
ROWS: Final = "SELECT request_id, input_tokens, output_tokens FROM generations WHERE request_id LIKE 'batch%'"


@dataclass(frozen=True, slots=True)
class Result:
    """What became of the lines; the numbers from ``missing`` to ``unended`` must be 0."""

    kills: int
    batches: int
    lines: int
    answered: int
    failed: dict[str, int]
    missing: int
    doubled: int
    unbilled: int
    billed_twice: int
    billed_otherwise: int
    unended: int
    seconds: float

    @property
    def good(self) -> bool:
        """Return whether every line has one result and one ledger row."""
        results = self.missing or self.doubled or self.unended
        return not (results or self.unbilled or self.billed_twice or self.billed_otherwise)


async def submit(session: aiohttp.ClientSession, url: str, key: str, lines: int, number: int) -> str | None:
    """Upload a file and submit a batch; return its id, or ``None`` when the gateway did not answer."""
    rows = [
        {
            "custom_id": f"b{number}-{line}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": MODEL, "messages": [{"role": "user", "content": f"question {number} {line}"}]},
        }
        for line in range(lines)
    ]
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", "\n".join(map(json.dumps, rows)), filename="lines.jsonl")
    with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with session.post(f"{url}/v1/files", data=form, headers=bearer(key)) as answer:
            file = (await answer.json()).get("id")
        body = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        async with session.post(f"{url}/v1/batches", json=body, headers=bearer(key)) as answer:
            return (await answer.json()).get("id") if answer.status == 200 else None
    return None


async def get(session: aiohttp.ClientSession, url: str, key: str) -> Any:
    """Return the JSON answer of a GET request."""
    async with session.get(url, headers=bearer(key)) as answer:
        answer.raise_for_status()
        return await answer.json()


async def listed(session: aiohttp.ClientSession, url: str, key: str) -> list[dict[str, Any]]:
    """All batches of a tenant."""
    found: list[dict[str, Any]] = []
    while True:
        after = f"&after={found[-1]['id']}" if found else ""
        page = await get(session, f"{url}/v1/batches?limit=100{after}", key)
        found += page["data"]
        if not page["has_more"]:
            return found


async def keep_submitting(
    session: aiohttp.ClientSession, urls: list[str], key: str, lines: int, at_once: int, rng: random.Random
) -> None:
    """Keep ``at_once`` unfinished batches of a tenant."""
    while True:
        await asyncio.sleep(PAUSE_S)
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            url = rng.choice(urls)
            page = await get(session, f"{url}/v1/batches?limit={at_once}", key)
            if sum(one["status"] not in ENDED for one in page["data"]) < at_once:
                await submit(session, rng.choice(urls), key, lines, rng.randrange(10**9))


async def rows_of(session: aiohttp.ClientSession, url: str, key: str, file_id: str | None) -> list[Any]:
    """The rows of a file of results."""
    if file_id is None:
        return []
    async with session.get(f"{url}/v1/files/{file_id}/content", headers=bearer(key)) as answer:
        answer.raise_for_status()
        return [json.loads(row) for row in (await answer.text()).splitlines()]


async def checked(
    session: aiohttp.ClientSession, url: str, keys: dict[str, str], ledger: str
) -> dict[str, Any]:
    """Wait for the ends of all batches, and compare input, results and ledger."""
    until = time.perf_counter() + END_S
    while True:
        found = [(key, one) for key in keys.values() for one in await listed(session, url, key)]
        unended = sum(one["status"] not in ENDED for _, one in found)
        if not unended or time.perf_counter() > until:
            break
        await asyncio.sleep(1.0)
    engine = create_async_engine(ledger)
    async with engine.connect() as connection:
        bills: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for request_id, *tokens in await connection.execute(text(ROWS)):
            bills[request_id].append((tokens[0], tokens[1]))
    await engine.dispose()
    wrong: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    lines = answered = 0
    for key, batch in found:
        asked = {row["custom_id"] for row in await rows_of(session, url, key, batch["input_file_id"])}
        done = await rows_of(session, url, key, batch["output_file_id"])
        not_done = await rows_of(session, url, key, batch["error_file_id"])
        counts = Counter(row["custom_id"] for row in [*done, *not_done])
        lines, answered = lines + len(asked), answered + len(done)
        wrong["missing"] += len(asked - counts.keys())
        wrong["doubled"] += sum(count - 1 for count in counts.values()) + len(counts.keys() - asked)
        for row in not_done:
            error = row["error"] or row["response"]["body"]["error"]
            failed[error["code"]] += 1
        for row in done:
            billed, usage = bills[row["response"]["request_id"]], row["response"]["body"]["usage"]
            wrong["unbilled"] += not billed
            wrong["billed_twice"] += len(billed) > 1
            wrong["billed_otherwise"] += billed[:1] != [(usage["prompt_tokens"], usage["completion_tokens"])]
        of_errors = [row["response"]["request_id"] for row in not_done if row["response"]]
        wrong["billed_otherwise"] += sum(bool(bills[one]) for one in of_errors)
    names = ("missing", "doubled", "unbilled", "billed_twice", "billed_otherwise")
    return {
        "batches": len(found),
        "lines": lines,
        "answered": answered,
        "failed": dict(failed),
        "unended": unended,
        **{name: wrong[name] for name in names},
    }


async def run(
    ledger: str, folder: Path, *, kills: int, kill_every_s: float, lines: int, at_once: int, seed: int
) -> Result:
    """Run the whole benchmark once."""
    began, rng = time.perf_counter(), random.Random(seed)
    gateways = [Gateway(folder / name, free_port()) for name in ("a", "b")]
    urls = [gateway.url for gateway in gateways]
    with worker(folder, TOKEN_S) as port, contextlib.ExitStack() as ending:
        for gateway in gateways:
            gateway.folder.mkdir()
            state = f"sqlite:///{folder}/state.db"
            configure(gateway.folder, port=gateway.port, worker=port, ledger=ledger, state=state)
            with (gateway.folder / "sluice.yaml").open("a") as settings:
                yaml.safe_dump({"batches": {"folder": str(folder / "files")}}, settings)
            gateway.start()
            ending.callback(gateway.kill, signal.SIGTERM)
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            await all_ready(session, gateways)
            keys = await tenants_keys(session, urls[0])
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(keep_submitting(session, urls, key, lines, at_once, rng))
                    for key in keys.values()
                ]
                running += [
                    tasks.create_task(keep_killing(session, one, kill_every_s, rng)) for one in gateways
                ]
                shown = 0
                while (so_far := sum(gateway.kills for gateway in gateways)) < kills:
                    if so_far >= shown + 10:
                        shown = so_far
                        Console(stderr=True).print(f"{shown} of {kills} kills", highlight=False)
                    await asyncio.sleep(0.1)
                for task in running:
                    task.cancel()
            for gateway in gateways:
                if gateway.process is None:
                    gateway.start()
            await all_ready(session, gateways)
            outcome = await checked(session, urls[0], keys, ledger)
    seconds = round(time.perf_counter() - began, 1)
    return Result(kills=sum(gateway.kills for gateway in gateways), seconds=seconds, **outcome)


def main(
    kills: Annotated[int, typer.Option(min=1, help="Of either gateway.")] = 200,
    kill_every: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two kills of one, about.")
    ] = 8.0,
    lines: Annotated[int, typer.Option(min=1, help="Of a batch.")] = 40,
    at_once: Annotated[int, typer.Option(min=1, help="Batches of a tenant without an end.")] = 2,
    database: Annotated[str, typer.Option(help="postgresql or sqlite.")] = "postgresql",
    seed: Annotated[int, typer.Option(help="Of the moments of the kills.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="JSON.")] = False,
) -> None:
    """Kill, check and compare; exit code 1 when a line has not exactly one result and one ledger row."""
    console = Console()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as ending:
        folder = Path(name)
        server = ending.enter_context(postgres()) if database == "postgresql" else None
        url = f"sqlite+aiosqlite:///{folder}/ledger.db" if server is None else server.url
        result = asyncio.run(
            run(url, folder, kills=kills, kill_every_s=kill_every, lines=lines, at_once=at_once, seed=seed)
        )
    if as_json:
        print(json.dumps({**asdict(result), "good": result.good}))
    else:
        for field_name, value in asdict(result).items():
            console.print(f"{field_name:>20}  {value}", highlight=False)
    raise typer.Exit(0 if result.good else 1)


if __name__ == "__main__":
    typer.run(main)
