"""Thousands of malformed requests: no answer is 500, every request is answered, and no memory leaks."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.app import create_app
from gateway.config.settings import load_settings
from gateway.wiring.build import build
from observability.logs import configure_logging
from tests.http.fuzz import Fuzzer, FuzzRequest
from tests.scripted import ScriptedBackend

# Marked by hand, because no process is started: thousands of requests take many seconds.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
KEY = "a-key-for-tests-0123456789-0123456789"
COUNT = int(os.environ.get("SLUICE_TEST_FUZZ", "2000"))
SEED = int(os.environ.get("SLUICE_TEST_FUZZ_SEED", "0"))
AT_ONCE = 16
# A drain ends the gateway; the deep check waits for an engine.
LEFT_OUT = frozenset({"/admin/drain", "/health/deep"})
# Requests that were once answered wrongly: add the request that a failure prints.
KEPT: tuple[FuzzRequest, ...] = (
    # A time that is before year 1 in UTC: the message of the refusal could not be written.
    FuzzRequest("POST", "/admin/keys", body=b'{"tenant":"a","expires_at":"0001-01-01T00:00:00+14:00"}'),
    # A revision number that no database can store.
    FuzzRequest("POST", "/admin/routing/rollback", body=b'{"to":10000000000000000000000000000000000000000}'),
)


class ScriptedResident(ScriptedBackend):
    """A backend that answers at once."""

    async def run(self) -> None:
        """Do nothing until cancelled."""
        await asyncio.Event().wait()


@asynccontextmanager
async def gateway(folder: Path) -> AsyncIterator[tuple[httpx.AsyncClient, Fuzzer]]:
    """Run a wired gateway with a state store and a ledger in this process."""
    (folder / "sluice.json").write_text(
        json.dumps(
            {
                "engine": {"model": str(ROOT / "models/demo"), "max_model_len": 4096},
                "backends": {"local": {"kind": "engine"}, "other": {"kind": "engine"}},
                "routing": {"file": str(ROOT / "routing.yaml")},
                "prompts": {"folder": str(ROOT / "prompts")},
                "chaos": {"enabled": True},
                # A request to a backend that hangs by an injected fault ends after this time.
                "server": {"request_timeout_seconds": 2},
                "state": {"url": f"sqlite:///{folder}/state.db"},
                "ledger": {"url": f"sqlite+aiosqlite:///{folder}/ledger.db"},
            }
        )
    )
    made = build(
        load_settings(folder / "sluice.json", {}),
        admin_key=KEY,
        engine_pool=lambda name, queued, limit_context: ScriptedResident(name),
    )
    app = create_app(made.services)
    transport = httpx.ASGITransport(app, raise_app_exceptions=True)
    async with made.running(), httpx.AsyncClient(transport=transport, base_url="http://gw") as client:
        yield client, Fuzzer(app.openapi(), KEY, without=LEFT_OUT)


async def answered(client: httpx.AsyncClient, request: FuzzRequest, hidden: tuple[str, ...]) -> int:
    """Send the request; its status. Raises AssertionError for an answer that no request may get."""
    headers = {"authorization": f"Bearer {KEY}".encode(), **request.headers}
    sent = client.build_request(request.method, "/", headers=headers, content=request.body)
    sent.url = httpx.URL(f"http://gw{request.target}")
    async with asyncio.timeout(60):
        answer = await client.send(sent)
    assert answer.status_code != 500 and "Traceback" not in answer.text, answer.text
    if (
        answer.status_code >= 400
        and request.method != "HEAD"
        and request.target.partition("?")[0] != "/ready"
    ):
        error = answer.json()["error"]
        code = error.get("code") or error["sluice_code"]
        assert error["message"] and code and not any(word in answer.text for word in hidden), error
    return answer.status_code


class Steps:
    """Measures the longest step of any task of a block, from one wait to the next, in seconds of CPU time.

    On a busy machine many tasks are ready in one turn of the event loop, so the turns show nothing.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the tasks that the block creates."""
        loop = asyncio.get_running_loop()
        loop.set_task_factory(
            lambda loop, work, **named: asyncio.Task(MeasuredWork(work, self), loop=loop, **named)
        )
        try:
            yield
        finally:
            loop.set_task_factory(None)


class MeasuredWork(Coroutine[Any, Any, Any]):
    """A task's coroutine whose steps are measured."""

    def __init__(self, work: Any, steps: Steps) -> None:
        self._work, self._steps = work, steps

    def send(self, value: Any) -> Any:
        return self._step(self._work.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._work.throw, *error)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Any:
        raise NotImplementedError("only a task runs it")

    def _step(self, take: Any, *given: Any) -> Any:
        began = time.thread_time()
        try:
            return take(*given)
        finally:
            self._steps.longest_s = max(self._steps.longest_s, time.thread_time() - began)


def resident_mib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


@pytest.fixture
def quiet() -> Iterator[None]:
    """Keep the log lines of thousands of requests out of the output."""
    logs = configure_logging("critical", stream=io.StringIO())
    yield
    logs.close()


@pytest.mark.usefixtures("quiet")
async def test_no_request_makes_an_internal_error_a_stall_or_memory_that_stays(tmp_path: Path) -> None:
    statuses = Counter[int]()
    hidden = (str(tmp_path), str(ROOT), "site-packages")

    async def take(client: httpx.AsyncClient, requests: Iterator[FuzzRequest]) -> None:
        for request in requests:
            await asyncio.sleep(0)  # the next request is not a part of this one's last step
            try:
                status = await answered(client, request, hidden)
            except Exception as error:
                raise AssertionError(f"add to KEPT: {request}") from error
            statuses[status] += 1
            if status == 200 and request.target.startswith("/admin/chaos"):
                await answered(client, FuzzRequest("POST", "/admin/chaos", body=b'{"faults":[]}'), hidden)

    async def all_of(client: httpx.AsyncClient, requests: Iterator[FuzzRequest]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(take(client, requests))

    async with gateway(tmp_path) as (client, fuzzer):
        await all_of(client, iter(KEPT))
        warm = COUNT // 4
        await all_of(client, fuzzer.requests(SEED, warm))
        # As the server does after its start: the garbage collector does not scan the loaded objects again.
        gc.collect()
        gc.freeze()
        before, steps = resident_mib(), Steps()
        try:
            with steps.measured():
                await all_of(client, fuzzer.requests(SEED + warm, COUNT - warm))
        finally:
            gc.unfreeze()
        grown = resident_mib() - before
        shown: Any = (await client.get("/admin/admission", headers={"authorization": f"Bearer {KEY}"})).json()
    summary = f"{dict(statuses)}, {steps.longest_s * 1e3:.0f} ms of work at once, {grown} MiB more"
    print(summary)
    assert shown
    # The requests pass validation too: there are answers, changes and refusals of every kind.
    assert {200, 201, 400, 401, 404, 405, 409, 422} <= set(statuses), summary
    assert statuses[200] > COUNT // 10, summary
    assert steps.longest_s < 0.25, summary
    assert grown < 64, summary


@pytest.mark.parametrize("seed", [0, 7, 123_456])
def test_a_seed_gives_the_same_request_again(seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
        "required": ["a"],
    }
    body = {"content": {"application/json": {"schema": schema}}}
    document = {
        "paths": {"/a/{id}": {"post": {"parameters": [{"name": "id", "in": "path"}], "requestBody": body}}}
    }
    one, other = (Fuzzer(document, "key", without=frozenset()).request(seed) for _ in range(2))
    assert one == other and one.target.startswith("/a/")
