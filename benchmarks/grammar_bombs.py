"""Hostile and ordinary schemas through the gateway's check: whether each is refused, and how long it takes.

``python -m benchmarks.grammar_bombs`` prints a line for each hostile schema, then the cost of the check for
the ordinary ones, and its effect on this process: the longest pause and the memory. Then one tenant sends the
hostile schemas to a gateway, ``CALLERS`` at a time, while another tenant sends ordinary schemas at a steady
rate, each of them new, and a probe requests ``/ping``.
"""

import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import psutil

from benchmarks.routing_propagation import KEY, ROUTE, ready
from benchmarks.tokenize_flood import SETTLE_S, gateway, observe
from gateway.contracts.values import FormatType, ResponseFormat
from gateway.errors import GatewayError
from gateway.generation.grammars import WORK, GrammarChecks
from gateway.limited.process import LimitedProcess, Limits

Schema = dict[str, Any]
CALLERS = 12
SECONDS = 15.0
TEXT: Schema = {"type": "string"}


def nested(depth: int, wrap: Callable[[Any], Any], leaf: Any = TEXT) -> Any:
    """``leaf`` in ``depth`` layers of ``wrap``."""
    for _ in range(depth):
        leaf = wrap(leaf)
    return leaf


def chained(depth: int, link: Callable[[Schema], Schema]) -> Schema:
    """Return definitions, each of which refers to the next one through ``link``."""
    chain = {f"d{at}": link({"$ref": f"#/$defs/d{at + 1}"}) for at in range(depth)}
    return {"$defs": {**chain, f"d{depth}": TEXT}, "$ref": "#/$defs/d0"}


def _fields(count: int, of: Any, **more: Any) -> Schema:
    return {"type": "object", "properties": {f"property_{at}": of for at in range(count)}, **more}


HOSTILE_SCHEMAS: Mapping[str, Any] = MappingProxyType(
    {
        "multipleOf": {"type": "integer", "multipleOf": 999_979},
        "multipleOf, twice": {
            "type": "object",
            "properties": {
                "a": {"multipleOf": 99_991, "type": "integer"},
                "b": {"multipleOf": 99_989, "type": "integer"},
            },
        },
        "multipleOf of several": {
            "allOf": [{"type": "integer", "multipleOf": one} for one in (997, 991, 983, 977)]
        },
        "multipleOf of many digits": {"type": "number", "multipleOf": 0.000999979},
        "minItems of a thousand million": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 10**9},
        "minItems": {"type": "array", "items": TEXT, "minItems": 10**6},
        "maxItems": {"type": "array", "items": TEXT, "maxItems": 10**6},
        "maxItems, nested": nested(3, lambda one: {"type": "array", "items": one, "maxItems": 1000}),
        "minLength": {"type": "string", "minLength": 10**6},
        "maxLength": {"type": "string", "maxLength": 10**6},
        "pattern and length": {
            "type": "string",
            "pattern": "^(ab|cd)*x.*y.*z$",
            "minLength": 500,
            "maxLength": 5000,
        },
        "anyOf, nested": nested(9, lambda one: {"anyOf": [one, {"type": "integer"}, one]}),
        "anyOf in allOf": {
            "allOf": [{"anyOf": [_fields(1, TEXT, title=f"{i}{j}") for j in range(6)]} for i in range(8)]
        },
        "anyOf with one beginning": {"anyOf": [_fields(3, TEXT, required=[f"c{at}"]) for at in range(400)]},
        "enum of numbers": {"enum": list(range(4_900))},
        "enum of long texts": {"enum": ["x" * 30_000, "y" * 30_000]},
        "deep objects": nested(
            28, lambda one: {"type": "object", "properties": {"a": one}, "required": ["a"]}
        ),
        "deep arrays": nested(28, lambda one: {"type": "array", "items": one}),
        "$ref to itself": {"$ref": "#"},
        "$ref in a ring": {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            "$ref": "#/$defs/a",
        },
        "$ref, doubled by allOf": chained(24, lambda next_: {"allOf": [next_, next_]}),
        "$ref, doubled by anyOf": chained(24, lambda next_: {"anyOf": [next_, next_]}),
        "$ref, eight times each": chained(24, lambda next_: _fields(8, next_)),
        "$ref to another host": {"$ref": "http://169.254.169.254/latest/meta-data"},
        "$ref to a file": {"$ref": "file:///etc/passwd"},
        "pattern, exponential": {"type": "string", "pattern": "^(a|b)*a(a|b){18}$"},
        "pattern, repeated four times": {"type": "string", "pattern": "^((((a{1,50}){1,50}){1,50}){1,50})$"},
        "pattern, a million": {"type": "string", "pattern": "^.{1,1000000}$"},
        "pattern of all letters": {"type": "string", "pattern": "^(\\p{L}|\\p{N}|\\w){1,2000}$"},
        "pattern, intersected": {
            "allOf": [{"type": "string", "pattern": f".*{one}.{{14}}"} for one in "abc"]
        },
        "many optional properties": _fields(1_500, TEXT, additionalProperties={"type": "integer"}),
        "uniqueItems": {
            "type": "array",
            "uniqueItems": True,
            "items": {"enum": [str(at) for at in range(1000)]},
        },
        "format and length": {"type": "string", "format": "uri", "minLength": 900, "maxLength": 1000},
        "format and pattern": {"type": "string", "format": "email", "pattern": ".*[0-9].{10}@.*x"},
        "patternProperties": {
            "type": "object",
            "patternProperties": {f"^a{at}.*b.{{8}}$": TEXT for at in range(100)},
        },
        "many ranges": {
            "type": "object",
            "properties": {
                f"p{at}": {"type": "number", "minimum": at * 1.234567, "maximum": at * 987654.321 + 10}
                for at in range(500)
            },
        },
        "not": {"not": {"type": "string", "pattern": "(a|b)*a(a|b){12}"}},
        "wrong types": {"type": ["string", "wish"], "properties": 3},
    }
)
HOSTILE: tuple[tuple[str, ResponseFormat], ...] = (
    *(
        (name, ResponseFormat(FormatType.JSON_SCHEMA, json.dumps(one)))
        for name, one in HOSTILE_SCHEMAS.items()
    ),
    ("regex, repeated", ResponseFormat(FormatType.REGEX, "((((a{1,60}){1,60}){1,60}){1,60})")),
    ("regex, exponential", ResponseFormat(FormatType.REGEX, "(.*[a-m].{9}){8}")),
    ("regex of parentheses", ResponseFormat(FormatType.REGEX, "(" * 20_000 + "a" + ")" * 20_000)),
    ("lark, ambiguous", ResponseFormat(FormatType.GRAMMAR, 'start: s\ns: s s s | s s | "a" | ')),
    ("lark, repeated", ResponseFormat(FormatType.GRAMMAR, 'start: a{1000}\na: b{1000}\nb: c{1000}\nc: "x"')),
    (
        "lark with a schema",
        ResponseFormat(FormatType.GRAMMAR, 'start: %json {"type":"integer","multipleOf":999979}'),
    ),
    (
        "gbnf of parentheses",
        ResponseFormat(FormatType.GRAMMAR, "root ::= " + "(" * 9_000 + '"a"' + ")" * 9_000),
    ),
    ("choices, many", ResponseFormat(FormatType.CHOICE, json.dumps([f"choice {at}" for at in range(4_500)]))),
    ("choices, long", ResponseFormat(FormatType.CHOICE, json.dumps(["ab" * 15_000, "ba" * 15_000]))),
)


async def verdict(checks: GrammarChecks, shape: ResponseFormat, tenant: str = "a") -> str:
    """``built``, or the code of the refusal with its message."""
    try:
        await checks.check(shape, tenant)
    except GatewayError as error:
        return f"{error.status} {error.code}: {error.message}"
    return "built"


async def longest_pause(stop: asyncio.Event) -> float:
    """Return the longest time, in seconds, for which the event loop was blocked."""
    longest = 0.0
    while not stop.is_set():
        before = time.perf_counter()
        await asyncio.sleep(0.001)
        longest = max(longest, time.perf_counter() - before - 0.001)
    return longest


async def flood(client: aiohttp.ClientSession, url: str, key: str, statuses: Counter[int]) -> None:
    """Send hostile schemas one after the other, each new to the gateway, until cancelled."""
    headers = {"authorization": f"Bearer {key}"}
    for number in itertools.count():
        for schema in HOSTILE_SCHEMAS.values():
            body = _asking({**schema, "$comment": f"{id(headers)} {number}"})
            async with client.post(f"{url}/v1/generate", json=body, headers=headers) as answer:
                await answer.read()
                statuses[answer.status] += 1


def _asking(schema: Schema) -> Schema:
    shape = {"type": "json_schema", "json_schema": {"name": "shape", "schema": schema}}
    return {"route": ROUTE, "messages": [{"role": "user", "content": "hi"}], "response_format": shape}


async def print_times_in_flood(url: str, pid: int) -> None:
    """Print the other tenant's times and those of ``/ping``, alone and during the flood."""
    statuses, others = Counter[int](), Counter[int]()
    timeout, connector = aiohttp.ClientTimeout(total=60), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as client:
        await ready(client, url)
        keys = {}
        for tenant in ("flood", "other"):
            admin = {"authorization": f"Bearer {KEY}"}
            async with client.post(f"{url}/admin/keys", json={"tenant": tenant}, headers=admin) as made:
                keys[tenant] = (await made.json())["key"]
        new = itertools.count()

        async def request(number: int) -> None:
            fields = {"name": TEXT, f"field_{next(new)}": {"type": "integer"}}
            body = _asking({"type": "object", "properties": fields, "required": ["name"]})
            headers = {"authorization": f"Bearer {keys['other']}"}
            async with client.post(f"{url}/v1/generate", json=body, headers=headers) as answer:
                await answer.read()
                others[answer.status] += 1

        await observe(client, url, pid, request, SETTLE_S)
        phases = {"alone": await observe(client, url, pid, request, SECONDS)}
        async with asyncio.TaskGroup() as group:
            callers = [group.create_task(flood(client, url, keys["flood"], statuses)) for _ in range(CALLERS)]
            await asyncio.sleep(SETTLE_S)
            phases["in the flood"] = await observe(client, url, pid, request, SECONDS)
            for caller in callers:
                caller.cancel()
    for name, phase in phases.items():
        pings = sorted(phase.probed_s)
        p99 = pings[int(0.99 * len(pings))]
        print(
            f"{name}: shapes of the other tenant p50 {phase.quantile(0.5):.1f} ms,"
            f" p99 {phase.quantile(0.99):.1f} ms;"
            f" /ping p99 {p99 * 1e3:.1f} ms, longest {pings[-1] * 1e3:.1f} ms;"
            f" gateway {max(phase.memory) / 2**20:.0f} MiB"
        )
    print(f"statuses of the flood: {dict(statuses)}; of the other tenant: {dict(others)}")


async def main() -> None:
    """Measure, and print the figures."""
    from benchmarks.ordinary_shapes import ORDINARY

    checks = GrammarChecks(LimitedProcess(WORK, str(Path("models/demo/tokenizer.json")), limits=Limits()))
    this, stop = psutil.Process(), asyncio.Event()
    await verdict(checks, ResponseFormat(FormatType.REGEX, "start"))
    before = this.memory_info().rss
    async with asyncio.TaskGroup() as group:
        pause = group.create_task(longest_pause(stop))
        for name, shape in HOSTILE:
            started = time.perf_counter()
            said = await verdict(checks, shape)
            print(f"{time.perf_counter() - started:7.3f} s  {name}: {said[:100]}")
        first, again = list[float](), list[float]()
        for shape in ORDINARY.values():
            for times in (first, again):
                started = time.perf_counter()
                assert await verdict(checks, shape) == "built"
                times.append(time.perf_counter() - started)
        stop.set()
    for name, times in (("ordinary", first), ("ordinary, again", again)):
        print(f"{name}: median {statistics.median(times) * 1e3:.3f} ms, most {max(times) * 1e3:.3f} ms")
    grown = (this.memory_info().rss - before) / 2**20
    print(f"longest pause of this process: {pause.result() * 1e3:.0f} ms; its memory grew by {grown:.1f} MiB")
    checks.close()
    with tempfile.TemporaryDirectory() as folder, gateway(Path(folder)) as (url, pid):
        await print_times_in_flood(url, pid)


if __name__ == "__main__":
    asyncio.run(main())
