"""How exactly the limits of keys hold across gateway processes under full load, and what a limit costs.

    python -m benchmarks.quota_accuracy --url redis://127.0.0.1:6379/9
    python -m benchmarks.quota_accuracy                                  # a SQLite file of its own

Two gateways without an engine are in front of a fake worker. Each tenant has one key with one limit: requests
per minute, tokens per minute or tokens per day, in turn. It sends requests to both gateways over several
connections without pause, ignoring ``Retry-After``, for less than a minute. So exactly the limit may pass; of
a token limit, less than one more request's reservation must remain. Then the tenants pause until the minutes
are over, and start again. A request reserves its prompt and ``max_tokens``, and uses less.

The cost is measured on one connection to one gateway, with requests of a limited and an unlimited key in
turn. The state store must be empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.forwarding.gateways import python_module
from benchmarks.forwarding.processes import free_port, started
from benchmarks.forwarding.workload import Regime, bodies
from benchmarks.routing_propagation import ready
from observability.metrics_text import total_of

KEY = "sk-quota-benchmark-0123456789abcdef"
LIMITS = ("requests_per_minute", "tokens_per_minute", "tokens_per_day")
# Output tokens reserved for an answer; the worker's answer has 140.
MAX_TOKENS = 200
# Seconds until the window of a minute is surely over.
REST_S = 62.0
# Seconds until a refused caller asks again, so that the load is on the gateway and not on the caller.
PAUSE_S = 0.02
# A new key is in force everywhere within a second; on a busy machine it takes longer.
KNOWN_S = 60.0


@dataclass
class Tenant:
    """A tenant's key and limit, and the results of its requests."""

    name: str
    limit_name: str
    limit: int
    key: str = ""
    passed: list[int] = field(default_factory=list)
    refused: int = 0
    other: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Result:
    """Ratios are the passed amount over the limit, for the tenants with the least and the most.

    ``reserve``: what one request reserves. ``unused_reserves``: the most that was left of a token limit, in
    units of that: below 1, no request was refused that would have fitted. ``overshot``: tokens beyond a
    limit. ``misses``: how often the store did not answer, so that a process decided alone. ``again``: the
    second round. Costs are medians in microseconds, over whole requests.
    """

    store: str
    gateways: int
    tenants: int
    seconds: float
    requests: int
    refused: int
    failed: int
    requests_least: float
    requests_most: float
    tokens_least: float
    tokens_most: float
    reserve: int
    unused_reserves: float
    overshot: int
    misses: int
    again_least: float
    again_most: float
    unlimited_us: float
    limited_us: float
    cost_us: float


@contextlib.contextmanager
def fleet(folder: Path, url: str, gateways: int) -> Iterator[list[str]]:
    """Start the worker and the gateways; yield the addresses of the gateways."""
    with contextlib.ExitStack() as stack:
        worker_port = free_port()
        worker = python_module("benchmarks.forwarding.worker", worker_port)
        stack.enter_context(started(worker, folder / "worker.log"))
        backend = {"kind": "openai", "base_urls": [f"http://127.0.0.1:{worker_port}/v1"], "model": "base"}
        settings = {
            "engine": {"kind": "none", "model": "models/demo", "tokenizer": "models/demo"},
            "backends": {"base": {**backend, "metrics_path": None}},
            "routing": {"file": str(folder / "routing.yaml")},
            "state": {"url": url, "cache_dir": str(folder / "copies")},
            # The benchmark measures the limits of keys: no other limit may refuse a request.
            "admission": {"max_queue": 10_000, "max_wait_ms": 60_000, "max_in_flight": 10_000},
        }
        route = {"backends": [{"name": "base", "weight": 100}], "fallback": []}
        (folder / "routing.yaml").write_text(json.dumps({"routes": {"self_hosted_generation": route}}))
        (folder / "sluice.yaml").write_text(json.dumps(settings))
        found = []
        for number in range(gateways):
            port = free_port()
            env = {
                "SLUICE_ADMIN_KEY": KEY,
                "SLUICE_SERVER__PORT": str(port),
                "SLUICE_LEDGER__URL": f"sqlite+aiosqlite:///{folder}/ledger-{number}.db",
            }
            command = python_module("ops.cli", "serve", "--config", folder / "sluice.yaml")
            stack.enter_context(started(command, folder / f"gateway-{number}.log", env))
            found.append(f"http://127.0.0.1:{port}")
        yield found


def tenants_of(count: int, requests: int, tokens: int) -> list[Tenant]:
    """Return tenants with one limit each; limits of the same kind differ."""
    limits = {"requests_per_minute": requests, "tokens_per_minute": tokens, "tokens_per_day": tokens}
    names = [LIMITS[place % len(LIMITS)] for place in range(count)]
    return [
        Tenant(f"tenant-{place}", name, limits[name] + place * limits[name] // 100)
        for place, name in enumerate(names)
    ]


async def made(client: aiohttp.ClientSession, url: str, tenant: str, limits: dict[str, int]) -> str:
    """Create a key, and return it."""
    headers = {"authorization": f"Bearer {KEY}"}
    async with client.post(
        f"{url}/admin/keys", json={"tenant": tenant, "limits": limits}, headers=headers
    ) as response:
        answer = await response.json()
        if response.status != 201:
            raise RuntimeError(str(answer))
        key: str = answer["key"]
        return key


def body_of(number: int) -> bytes:
    """A conversation's next turn."""
    text = next(itertools.islice(bodies(Regime.CONVERSATION, stream=False, seed=f"{number}"), 1))[0]
    asked = json.loads(text)
    asked["max_tokens"] = MAX_TOKENS
    return json.dumps(asked).encode()


async def hammer(client: aiohttp.ClientSession, url: str, tenant: Tenant, body: bytes, until: float) -> None:
    """Send requests without pause until ``until``."""
    headers = {"authorization": f"Bearer {tenant.key}", "content-type": "application/json"}
    while time.monotonic() < until:
        try:
            async with client.post(f"{url}/v1/chat/completions", data=body, headers=headers) as response:
                answer = await response.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            tenant.other[type(error).__name__] += 1
            continue
        if response.status == 200:
            tenant.passed.append(answer["usage"]["total_tokens"])
        elif response.status == 429:
            tenant.refused += 1
            await asyncio.sleep(PAUSE_S)
        else:
            tenant.other[answer["error"]["code"]] += 1


async def round_of(
    client: aiohttp.ClientSession, urls: list[str], tenants: list[Tenant], connections: int, seconds: float
) -> None:
    """Run one round with all tenants at once."""
    for tenant in tenants:
        tenant.passed.clear()
    until, body = time.monotonic() + seconds, body_of(0)
    async with asyncio.TaskGroup() as group:
        for tenant in tenants:
            for url in urls:
                for _ in range(connections):
                    group.create_task(hammer(client, url, tenant, body, until))


async def known(client: aiohttp.ClientSession, url: str, key: str) -> None:
    """Wait until a gateway accepts a key: a second on an idle machine."""
    headers = {"authorization": f"Bearer {key}"}
    async with asyncio.timeout(KNOWN_S):
        while True:
            async with client.get(f"{url}/v1/models", headers=headers) as response:
                if response.status == 200:
                    return
            await asyncio.sleep(PAUSE_S)


async def metric(client: aiohttp.ClientSession, url: str, name: str) -> int:
    """A counter's sum over its labels."""
    async with client.get(f"{url}/metrics") as response:
        return int(total_of(await response.text(), name))


async def cost(client: aiohttp.ClientSession, url: str, turns: int) -> tuple[list[float], list[float]]:
    """Return the microseconds of requests of an unlimited and of a limited key, in turn."""
    big = dict.fromkeys(LIMITS, 10**12)
    keys = [await made(client, url, "free", {}), await made(client, url, "bound", big)]
    body, took = body_of(0), ([0.0] * 0, [0.0] * 0)
    for turn in range(2 * turns):
        headers = {"authorization": f"Bearer {keys[turn % 2]}", "content-type": "application/json"}
        begun = time.perf_counter()
        async with client.post(f"{url}/v1/chat/completions", data=body, headers=headers) as response:
            await response.read()
            if response.status != 200:
                raise RuntimeError(await response.text())
        took[turn % 2].append((time.perf_counter() - begun) * 1e6)
    warm = turns // 10
    return took[0][warm:], took[1][warm:]


async def held_by_one(client: aiohttp.ClientSession, url: str) -> int:
    """Return what one request reserves: a tiny token limit refuses it, and the message says what it needs."""
    key = await made(client, url, "tiny", {"tokens_per_day": 1})
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    async with client.post(f"{url}/v1/chat/completions", data=body_of(0), headers=headers) as response:
        body = await response.json()
    if "error" not in body:
        raise RuntimeError(f"a request beyond its limit was answered: {response.status} {body}")
    message = body["error"]["message"]
    return int(message.split("needs ")[1].split(",")[0])


def share(tenant: Tenant) -> float:
    """Return the passed amount over the limit."""
    used = len(tenant.passed) if tenant.limit_name == LIMITS[0] else sum(tenant.passed)
    return used / tenant.limit


async def measure(
    urls: list[str],
    store: str,
    tenants: list[Tenant],
    connections: int,
    seconds: float,
    turns: int,
    again: bool,
) -> Result:
    """Run the benchmark over running gateways."""
    timeout, connector = aiohttp.ClientTimeout(total=60), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as client:
        await asyncio.gather(*(ready(client, url) for url in urls))
        reserve = await held_by_one(client, urls[0])
        free, bound = await cost(client, urls[0], turns)
        for tenant in tenants:
            tenant.key = await made(client, urls[0], tenant.name, {tenant.limit_name: tenant.limit})
        await asyncio.gather(*(known(client, url, one.key) for url in urls for one in tenants))
        await round_of(client, urls, tenants, connections, seconds)
        of_requests = [share(one) for one in tenants if one.limit_name == LIMITS[0]]
        of_tokens = [one for one in tenants if one.limit_name != LIMITS[0]]
        left = [one.limit - sum(one.passed) for one in of_tokens]
        passed = sum(len(one.passed) for one in tenants)
        second: list[float] = []
        if again:
            await asyncio.sleep(REST_S)
            by_minute = [one for one in tenants if one.limit_name != LIMITS[2]]
            await round_of(client, urls, by_minute, connections, seconds)
            second = [share(one) for one in by_minute]
        misses = [await metric(client, url, "sluice_quota_store_misses_total") for url in urls]
    shares = [1 - gap / one.limit for one, gap in zip(of_tokens, left, strict=True)]
    return Result(
        store=store,
        gateways=len(urls),
        tenants=len(tenants),
        seconds=seconds,
        requests=passed + sum(one.refused for one in tenants),
        refused=sum(one.refused for one in tenants),
        failed=sum(sum(one.other.values()) for one in tenants),
        requests_least=min(of_requests),
        requests_most=max(of_requests),
        tokens_least=min(shares),
        tokens_most=max(shares),
        reserve=reserve,
        unused_reserves=max(left) / reserve,
        overshot=max(0, *(-one for one in left)),
        misses=sum(misses),
        again_least=min(second, default=0.0),
        again_most=max(second, default=0.0),
        unlimited_us=statistics.median(free),
        limited_us=statistics.median(bound),
        cost_us=statistics.median(bound) - statistics.median(free),
    )


def exact(result: Result) -> bool:
    """Return whether limits held: requests within 2 %, tokens within one request's reservation either way."""
    shares = [result.requests_least, result.requests_most]
    shares += [result.again_most] if result.again_most else []
    return (
        all(abs(one - 1.0) <= 0.02 for one in shares)
        and result.unused_reserves < 1.0
        and result.overshot <= result.reserve
        and not result.failed
    )


def shown(value: Any) -> str:
    """Format a value for the table."""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def main(
    url: Annotated[str, typer.Option(help="A state store; default: a SQLite file of its own.")] = "",
    gateways: Annotated[int, typer.Option(min=1, max=16)] = 2,
    tenants: Annotated[int, typer.Option(min=3, max=1_000)] = 20,
    requests: Annotated[int, typer.Option(min=10, help="The smallest limit of requests.")] = 100,
    tokens: Annotated[int, typer.Option(min=10_000, help="The smallest limit of tokens.")] = 200_000,
    connections: Annotated[int, typer.Option(min=1, help="Of each tenant to each gateway.")] = 2,
    seconds: Annotated[float, typer.Option(min=1, max=58)] = 50.0,
    turns: Annotated[int, typer.Option(min=20, help="Requests of each key for the cost.")] = 1_000,
    again: Annotated[bool, typer.Option(help="A second round when the minutes are over.")] = True,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Measure and print; exit code 1 when a limit did not hold."""
    with tempfile.TemporaryDirectory() as folder:
        state = url or f"sqlite:///{folder}/state.db"
        with fleet(Path(folder), state, gateways) as urls:
            result = asyncio.run(
                measure(
                    urls,
                    state.split(":")[0],
                    tenants_of(tenants, requests, tokens),
                    connections,
                    seconds,
                    turns,
                    again,
                )
            )
    if as_json:
        print(json.dumps(asdict(result)))
    else:
        table = Table("figure", "value", title=f"load average {os.getloadavg()[0]:.1f}")
        for name, value in asdict(result).items():
            table.add_row(name, shown(value))
        Console().print(table)
    if not exact(result):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
