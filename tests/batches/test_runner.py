"""Batches from their validation to the result files, over a real database."""

from __future__ import annotations

import asyncio
import io
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import structlog

from accounting.batch_tables import BatchLine, BatchRow, FileRow
from accounting.batches import BatchStore
from accounting.errors import LedgerUnavailable
from accounting.store import GenerationStore
from accounting.stored_responses import StoredResponse
from accounting.values import UsageRow
from gateway.batches import stages
from gateway.batches.batches import Batches, with_changes
from gateway.batches.files import Files
from gateway.batches.outcome import LineOutcome
from gateway.batches.reading import LineFault
from gateway.batches.runner import LEASE_S, MAX_REFUSED, MAX_TAKEOVERS, BatchRunner
from gateway.batches.stages import finish
from gateway.batches.storage import LocalFiles
from gateway.config.batches import BatchesSection
from gateway.contracts.batches import BatchBody
from gateway.contracts.values import Caller, CallerRole
from gateway.errors import BackendUnavailable, FileInUse, NotFound, QuotaExceeded, WindowTooShort
from gateway.keys.sealing import AesCipher
from tests.usage_rows import newest_rows

CHAT = "/v1/chat/completions"
ACME = Caller("acme", CallerRole.CALLER, "key_1")
Outcome = Callable[[BatchLine, int], LineOutcome]


def answered(line: BatchLine, attempt: int) -> LineOutcome:
    row = UsageRow(
        f"gen_{line.number}", f"req_{line.number}", "acme", "key_1", "openai", "main", 1_800_000_000.0,
        input_tokens=10, output_tokens=2,
    )  # fmt: skip
    return LineOutcome(200, b'{"attempt":%d}' % attempt, row)


@dataclass
class Lines:
    """Answers lines by ``outcome``; lines stay at work while ``holds`` is set."""

    outcome: Outcome = answered
    holds: bool = False
    is_ready: bool = True
    stops: bool = False
    tries: Counter[int] = field(default_factory=Counter)
    order: list[int] = field(default_factory=list)
    at_work: set[int] = field(default_factory=set)
    most_at_work: int = 0
    cancelled: list[int] = field(default_factory=list)

    def ready(self) -> bool:
        return self.is_ready

    def stopping(self) -> bool:
        return self.stops

    def fault(self, batch: BatchRow, body: bytes) -> LineFault | None:
        wrong = b"wrong" in body
        return LineFault("invalid_request", "it is wrong", None, "body.x") if wrong else None

    async def run(self, batch: BatchRow, line: BatchLine, body: bytes) -> LineOutcome:
        assert orjson.loads(body)["number"] == line.number
        self.tries[line.number] += 1
        self.order.append(line.number)
        self.at_work.add(line.number)
        self.most_at_work = max(self.most_at_work, len(self.at_work))
        try:
            while self.holds:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await asyncio.sleep(0)
            return self.outcome(line, self.tries[line.number])
        except asyncio.CancelledError:
            self.cancelled.append(line.number)
            raise
        finally:
            self.at_work.discard(line.number)


@dataclass
class Engines:
    """Capacity that the test sets: ``places``, some of them taken by ``lines``."""

    places: int = 100
    lines: Lines = field(default_factory=Lines)
    callers: int = 0

    def room(self) -> int:
        return self.places - len(self.lines.at_work)

    def waiting(self) -> int:
        return max(0, self.callers - len(self.lines.cancelled))  # each cancelled line makes room for one


class BatchRig:
    """Makes gateways on one database and one folder; ``now`` is their Unix time."""

    store_type = BatchStore
    storage_type = LocalFiles

    def __init__(self, folder: Path, **section: Any) -> None:
        self.url = f"sqlite+aiosqlite:///{folder}/state.db"
        self.folder = folder
        self.now = float(int(time.time()))  # files have the system's timestamps
        self.section = BatchesSection(folder=str(folder / "files"), **section)
        self.names = 0

    def files(self, owner: str = "a") -> Files:
        storage = self.storage_type(Path(self.section.folder))
        return Files(self.store_type(self.url, owner), storage, self.section, lambda: self.now)

    @asynccontextmanager
    async def gateway(
        self, lines: Lines, engines: Engines | None = None, owner: str = "a"
    ) -> AsyncIterator[Batches]:
        files, loop = self.files(owner), asyncio.get_running_loop()
        runner = BatchRunner(files, engines or Engines(), loop.time, tick_s=0.005, poll_s=0.02)
        runner.lines = lines
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(runner.run())
            try:
                yield Batches(files, runner.lines_per_s)
            finally:
                running.cancel()

    async def create_batch(
        self, batches: Batches, count: int, models: int = 1, note: str = "", **asked: Any
    ) -> str:
        """Create a batch of ``count`` lines, for ``models`` in turn, and return its id."""
        file = await self.upload(batches.files, count, models, note=note)
        self.names += 1
        body = BatchBody.model_validate(
            {"input_file_id": file.file_id, "endpoint": CHAT, "completion_window": "24h", **asked}
        )
        return str((await batches.create(ACME, f"batch_{self.names}", body))["id"])

    async def upload(
        self, files: Files, count: int, models: int = 1, tenant: str = "acme", **body: Any
    ) -> FileRow:
        content = b"".join(
            json.dumps(
                {
                    "custom_id": f"r{number}",
                    "method": "POST",
                    "url": CHAT,
                    "body": {"model": f"demo{number % models or ''}", "number": number, **body},
                }
            ).encode()
            + b"\n"
            for number in range(1, count + 1)
        )
        self.names += 1
        name = f"file-{self.names:02}"
        return await files.add(tenant, name, "in.jsonl", "batch", io.BytesIO(content), len(content))

    async def rows(self) -> Counter[str]:
        """Count the ledger's rows by generation."""
        store = GenerationStore(self.url)
        store.connect()
        await store.prepare()
        found = Counter(row.generation_id for row in await newest_rows(store, 1_000))
        await store.close(None)
        return found


@pytest.fixture
def rig(tmp_path: Path) -> BatchRig:
    return BatchRig(tmp_path)


async def until(batches: Batches, batch_id: str, *statuses: str, tenant: str = "acme") -> dict[str, Any]:
    for _ in range(6_000):
        shown = await batches.show(tenant, batch_id)
        if shown["status"] in statuses:
            return shown
        await asyncio.sleep(0.01)
    raise AssertionError(shown)


async def until_true(condition: Callable[[], bool]) -> None:
    for _ in range(6_000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to be")


def results(batches: Batches, file_id: str | None) -> dict[str, Any]:
    if file_id is None:
        return {}
    content = b"".join(batches.files.storage.chunks(file_id))
    parsed = [orjson.loads(one) for one in content.splitlines()]
    assert len({one["custom_id"] for one in parsed}) == len(parsed)
    return {one["custom_id"]: one for one in parsed}


async def test_every_line_is_answered_and_billed_once(rig: BatchRig) -> None:
    lines = Lines()
    async with rig.gateway(lines) as batches:
        batch_id = await rig.create_batch(batches, 40, metadata={"team": "search"})
        done = await until(batches, batch_id, "completed")
        output = results(batches, done["output_file_id"])
    assert done["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
    assert (done["error_file_id"], done["metadata"], done["model"]) == (None, {"team": "search"}, "demo")
    assert done["usage"]["input_tokens"] == 400 and done["usage"]["total_tokens"] == 480
    assert output.keys() == {f"r{number}" for number in range(1, 41)}
    request_id = f"batch_req_{batch_id.removeprefix('batch_')}_7"
    assert output["r7"]["response"] == {"status_code": 200, "request_id": request_id, "body": {"attempt": 1}}
    assert await rig.rows() == {f"gen_{number}": 1 for number in range(1, 41)}


async def test_a_wrong_line_fails_the_whole_batch_before_anything_runs(rig: BatchRig) -> None:
    lines = Lines()
    async with rig.gateway(lines) as batches:
        file = await rig.upload(batches.files, 3, note="wrong")
        asked = BatchBody(input_file_id=file.file_id, endpoint=CHAT, completion_window="24h")
        await batches.create(ACME, "batch_w", asked)
        failed = await until(batches, "batch_w", "failed")
    assert [(one["line"], one["param"]) for one in failed["errors"]["data"]] == [
        (1, "body.x"),
        (2, "body.x"),
        (3, "body.x"),
    ]
    assert failed["failed_at"] and not lines.tries


class BreaksOnOne(Lines):
    """Has a defect that one batch's bodies bring out."""

    def fault(self, batch: BatchRow, body: bytes) -> LineFault | None:
        if b"breaks" in body:
            raise RecursionError
        return super().fault(batch, body)


async def test_a_file_that_cannot_be_checked_ends_its_own_batch_alone(rig: BatchRig) -> None:
    deep = io.BytesIO(b'{"custom_id":"a","method":"POST","url":"%b","body":{"a":%b1%b}}' % (
        CHAT.encode(), b"[" * 400, b"]" * 400,
    ))  # fmt: skip
    async with rig.gateway(BreaksOnOne()) as batches:
        nested = await batches.files.add("acme", "file-0d", "in", "batch", deep, len(deep.getvalue()))
        for number, file in enumerate((await rig.upload(batches.files, 1, note="breaks"), nested)):
            asked = BatchBody(input_file_id=file.file_id, endpoint=CHAT, completion_window="24h")
            await batches.create(ACME, f"batch_b{number}", asked)
        ends = [await until(batches, f"batch_b{number}", "failed") for number in range(2)]
        await until(batches, await rig.create_batch(batches, 2), "completed")
    assert [one["errors"]["data"][0]["code"] for one in ends] == ["internal", "invalid_body"]


async def test_a_batch_whose_input_is_not_in_the_gateways_storage_says_so_and_so_does_the_log(
    rig: BatchRig,
) -> None:
    """As when another gateway on the database has another folder."""
    with structlog.testing.capture_logs() as logs:
        async with rig.gateway(Lines()) as batches:
            file = await rig.upload(batches.files, 2)
            batches.files.storage.delete(file.file_id)
            asked = BatchBody(input_file_id=file.file_id, endpoint=CHAT, completion_window="24h")
            await batches.create(ACME, "batch_f", asked)
            failed = await until(batches, "batch_f", "failed")
    [fault] = failed["errors"]["data"]
    assert (fault["code"], fault["param"]) == ("file_not_found", "input_file_id")
    assert "batches.folder" in fault["message"]
    [told] = [one for one in logs if one["event"] == "file not read"]
    assert told["file"] == file.file_id and str(rig.folder) in told["reason"]


async def test_lines_whose_input_is_no_longer_in_the_gateways_storage_say_so(rig: BatchRig) -> None:
    engines = Engines(0)
    async with rig.gateway(Lines(), engines) as batches:
        batch_id = await rig.create_batch(batches, 1)
        shown = await until(batches, batch_id, "in_progress")
        batches.files.storage.delete(shown["input_file_id"])
        engines.places = 1
        ended = await until(batches, batch_id, "completed")
        [failed] = results(batches, ended["error_file_id"]).values()
    assert "batches.folder" in failed["response"]["body"]["error"]["message"]


async def test_lines_of_a_file_that_was_damaged_after_its_check_fail_and_end_nothing_else(
    rig: BatchRig,
) -> None:
    engines = Engines(0)
    async with rig.gateway(Lines(), engines) as batches:
        batch_id = await rig.create_batch(batches, 2)
        shown = await until(batches, batch_id, "in_progress")
        size = (await batches.files.get("acme", shown["input_file_id"])).bytes
        batches.files.storage.put(shown["input_file_id"], io.BytesIO(b"x" * size))
        engines.places = 2
        ended = await until(batches, batch_id, "completed")
        await until(batches, await rig.create_batch(batches, 2), "completed")
    assert ended["request_counts"] == {"total": 2, "completed": 0, "failed": 2}


async def test_lines_whose_input_the_storage_does_not_give_now_run_later_or_elsewhere(tmp_path: Path) -> None:
    class Storage(LocalFiles):
        refused = 0

        def chunks(self, file_id: str, start: int = 0, size: int | None = None) -> Iterator[bytes]:
            if size is not None:  # a line, not the check of the whole file
                self.refused += 1
                raise OSError("the storage does not answer")
            return super().chunks(file_id, start, size)

    class Rig(BatchRig):
        def files(self, owner: str = "a") -> Files:
            if owner == "b":
                return super().files(owner)
            return Files(self.store_type(self.url, owner), storage, self.section, lambda: self.now)

    rig, storage = Rig(tmp_path), Storage(tmp_path / "files")
    async with rig.gateway(Lines()) as batches:
        batch_id = await rig.create_batch(batches, 3)
        await until_true(lambda: storage.refused >= 3)
        async with rig.gateway(Lines(), owner="b"):
            ended = await until(batches, batch_id, "completed")
    assert ended["request_counts"] == {"total": 3, "completed": 3, "failed": 0}


async def test_a_gateway_without_the_key_of_encrypted_files_leaves_them_to_one_that_has_it(
    tmp_path: Path,
) -> None:
    """It took the encrypted bytes for wrong lines, and ended the batch with them."""

    class Plain(LocalFiles):
        refused = 0

        def check_key(self, file_id: str, size: int) -> None:
            try:
                super().check_key(file_id, size)
            except OSError:
                self.refused += 1
                raise

    class Rig(BatchRig):
        def files(self, owner: str = "a") -> Files:
            storage = (
                plain if owner == "b" else LocalFiles(tmp_path / "files", AesCipher([b"k" * 32], "files"))
            )
            return Files(self.store_type(self.url, owner), storage, self.section, lambda: self.now)

    rig, plain, engines = Rig(tmp_path), Plain(tmp_path / "files"), Engines(0)
    async with rig.gateway(Lines(), engines) as batches:
        running = await rig.create_batch(batches, 3)
        shown = await until(batches, running, "in_progress")
        async with rig.gateway(Lines(), owner="b") as keyless:
            await until_true(lambda: plain.refused >= 3)
            input_file = await keyless.files.get("acme", shown["input_file_id"])
            with pytest.raises(BackendUnavailable):
                await keyless.files.content(input_file)
        engines.places = 100
        ended = [await until(batches, running, "completed")]
        file = await rig.upload(batches.files, 2)
    plain.refused = 0
    asked = BatchBody(input_file_id=file.file_id, endpoint=CHAT, completion_window="24h")
    async with rig.gateway(Lines(), owner="b") as keyless:
        await keyless.create(ACME, "batch_c", asked)
        await until_true(lambda: plain.refused >= 1)
    async with rig.gateway(Lines()) as batches:
        ended.append(await until(batches, "batch_c", "completed"))
    assert [one["request_counts"]["completed"] for one in ended] == [3, 2]


async def test_failures_are_tried_again_and_then_told_in_the_error_file(rig: BatchRig) -> None:
    def outcome(line: BatchLine, attempt: int) -> LineOutcome:
        if line.number == 1:  # the caller's fault
            return LineOutcome(400, b'{"error":{"code":"x"}}')
        if line.number == 2 and attempt < 3:  # refused for now
            return LineOutcome(429, b"{}", retry_s=0.01)
        if line.number == 3 and attempt < 2:
            return LineOutcome(500, b"{}", failed_here=True)
        if line.number == 4:
            return LineOutcome(503, b'{"error":{"code":"dead"}}', engine_died=True)
        return answered(line, attempt)

    lines = Lines(outcome)
    async with rig.gateway(lines) as batches:
        done = await until(batches, await rig.create_batch(batches, 6), "completed")
        output, errors = (results(batches, done[f"{kind}_file_id"]) for kind in ("output", "error"))
    assert output.keys() == {"r2", "r3", "r5", "r6"}
    assert {name: one["response"]["status_code"] for name, one in errors.items()} == {"r1": 400, "r4": 503}
    assert [lines.tries[number] for number in range(1, 7)] == [1, 3, 2, 2, 1, 1]
    assert done["request_counts"] == {"total": 6, "completed": 4, "failed": 2}
    assert await rig.rows() == {f"gen_{number}": 1 for number in (2, 3, 5, 6)}


async def test_a_line_that_is_always_refused_holds_no_other_line_of_its_batch_up(rig: BatchRig) -> None:
    def outcome(line: BatchLine, attempt: int) -> LineOutcome:
        return LineOutcome(429, b"{}", retry_s=0.01) if line.place == 0 else answered(line, attempt)

    lines = Lines(outcome)
    async with rig.gateway(lines, Engines(1, lines)) as batches:
        batch_id = await rig.create_batch(batches, 6)
        await until_true(lambda: max(lines.tries.values(), default=0) > 20)
        shown = await batches.show("acme", batch_id)
    assert (shown["status"], shown["request_counts"]["completed"]) == ("in_progress", 5)


@pytest.mark.parametrize("refused", [4, MAX_REFUSED + 32])
async def test_a_model_that_is_refused_does_not_pause_the_lines_of_the_batchs_other_models(
    rig: BatchRig, refused: int
) -> None:
    """Lines of the refused model come first, and their pause is longer than the test waits."""

    def outcome(line: BatchLine, attempt: int) -> LineOutcome:
        if line.place < refused:
            pauses.append(line.place)
            return LineOutcome(503, b"{}", retry_s=0.05 if len(pauses) % MAX_REFUSED == 0 else 30.0)
        return answered(line, attempt)

    pauses: list[int] = []
    lines, count = Lines(outcome), refused + 6
    async with rig.gateway(lines, Engines(1, lines)) as batches:
        batch_id = await rig.create_batch(batches, count, models=2)
        await until_true(lambda: lines.tries.total() == count)
        shown = await batches.show("acme", batch_id)
        while shown["request_counts"]["completed"] < 6:
            await asyncio.sleep(0.01)
            shown = await batches.show("acme", batch_id)
    assert (shown["status"], shown["model"]) == ("in_progress", None)
    assert pauses == list(range(refused)), "a refused line runs again after its pause"


async def test_once_only_refused_lines_are_left_each_refusal_pauses_their_batch(rig: BatchRig) -> None:
    """A model that stays away costs one refusal a pause, not one a line."""
    lines = Lines(lambda line, attempt: LineOutcome(503, b"{}", retry_s=0.05 if attempt == 1 else 30.0))
    async with rig.gateway(lines, Engines(1, lines)) as batches:
        await rig.create_batch(batches, 8, models=2)
        await until_true(lambda: lines.tries.total() > 8)
        await asyncio.sleep(0.3)
    assert sorted(lines.tries.values()) == [1, 1, 1, 1, 1, 1, 1, 2]


async def test_a_pause_of_a_batch_is_logged_once_with_its_reason(rig: BatchRig) -> None:
    lines = Lines(lambda line, attempt: LineOutcome(429, b"{}", reason="requests_per_minute", retry_s=30.0))
    with structlog.testing.capture_logs() as log:
        async with rig.gateway(lines, Engines(4, lines)) as batches:
            batch_id = await rig.create_batch(batches, 8)
            await until_true(lambda: lines.tries.total() >= 4)
            await asyncio.sleep(0.2)
    [pause] = [one for one in log if one["event"] == "batch pauses"]
    assert (pause["batch"], pause["reason"], pause["pause_s"]) == (batch_id, "requests_per_minute", 30.0)


async def test_a_line_that_an_engine_died_on_runs_alone(rig: BatchRig) -> None:
    with_suspect: list[set[int]] = []

    class Watching(Lines):
        async def run(self, batch: BatchRow, line: BatchLine, body: bytes) -> LineOutcome:
            if self.tries[1] == 1 and line.number == 1:
                with_suspect.append(set(self.at_work))
            return await super().run(batch, line, body)

    def outcome(line: BatchLine, attempt: int) -> LineOutcome:
        if line.number == 1 and attempt == 1:
            return LineOutcome(503, b"{}", engine_died=True)
        return answered(line, attempt)

    async with rig.gateway(Watching(outcome)) as batches:
        done = await until(batches, await rig.create_batch(batches, 20), "completed")
    assert done["request_counts"]["completed"] == 20
    assert with_suspect == [set()]


async def test_lines_use_idle_capacity_and_the_newest_give_way_to_callers(rig: BatchRig) -> None:
    lines = Lines(holds=True)
    engines = Engines(3, lines)
    async with rig.gateway(lines, engines) as batches:
        batch_id = await rig.create_batch(batches, 8)
        await until_true(lambda: len(lines.at_work) == 3)
        engines.places = 0
        first = sorted(lines.order[:3])  # in order of their start; their bodies are read concurrently
        engines.callers = 2
        await until_true(lambda: len(lines.cancelled) >= 2)
        engines.callers = 0
        assert set(lines.cancelled[:2]) == set(first[1:])
        assert first[0] in lines.at_work
        lines.holds, engines.places = False, 100
        done = await until(batches, batch_id, "completed")
    assert done["request_counts"]["completed"] == 8
    assert lines.tries[first[0]] == 1 and lines.tries[first[2]] == 2
    assert set((await rig.rows()).values()) == {1}


class SlowStore(BatchStore):
    """A store that takes its time to store results, from the third on; ``storing`` counts those that wait."""

    storing = 0

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._third = asyncio.Event()

    async def finish(
        self,
        line: BatchLine,
        status: str,
        output: bytes,
        usage: UsageRow | None,
        response: StoredResponse | None = None,
    ) -> bool:
        SlowStore.storing += 1
        if SlowStore.storing == 3:
            self._third.set()
        try:
            await self._third.wait()
            await asyncio.sleep(0.3)
            return await super().finish(line, status, output, usage, response)
        finally:
            SlowStore.storing -= 1


async def test_a_line_whose_answer_is_being_stored_does_not_give_way_to_callers(rig: BatchRig) -> None:
    rig.store_type, lines = SlowStore, Lines()
    engines = Engines(3, lines)
    async with rig.gateway(lines, engines) as batches:
        batch_id = await rig.create_batch(batches, 3)
        await until_true(lambda: SlowStore.storing == 3)
        engines.callers = 3
        await asyncio.sleep(0.1)
        engines.callers = 0
        done = await until(batches, batch_id, "completed")
    assert done["request_counts"]["completed"] == 3
    assert set(lines.tries.values()) == {1}
    assert set((await rig.rows()).values()) == {1}


async def test_a_cancelled_batch_keeps_the_answers_that_are_being_stored(rig: BatchRig) -> None:
    rig.store_type, lines = SlowStore, Lines()
    async with rig.gateway(lines, Engines(3, lines)) as batches:
        batch_id = await rig.create_batch(batches, 3)
        await until_true(lambda: SlowStore.storing == 3)
        await batches.cancel("acme", batch_id)
        ended = await until(batches, batch_id, "cancelled")
    assert ended["request_counts"] == {"total": 3, "completed": 3, "failed": 0}


async def test_a_gateway_that_ends_stores_the_answers_that_it_has_first(rig: BatchRig) -> None:
    rig.store_type, lines = SlowStore, Lines()
    async with rig.gateway(lines, Engines(3, lines)) as batches:
        batch_id = await rig.create_batch(batches, 3)
        await until_true(lambda: SlowStore.storing == 3)
    rig.store_type = BatchStore  # a slow one would wait for three lines, also if fewer were left
    async with rig.gateway(lines, owner="b") as batches:
        done = await until(batches, batch_id, "completed")
    assert done["request_counts"]["completed"] == 3
    assert set(lines.tries.values()) == {1}
    assert set((await rig.rows()).values()) == {1}


class CannotRelease(BatchStore):
    """A store whose database is unavailable whenever a batch is released."""

    async def release(self, batch_id: str) -> None:
        raise LedgerUnavailable("the database is away")


async def test_a_batch_that_cannot_be_released_ends_nothing_else(rig: BatchRig) -> None:
    rig.store_type = CannotRelease
    async with rig.gateway(Lines()) as batches:
        done = await until(batches, await rig.create_batch(batches, 2), "completed")
    assert done["request_counts"]["completed"] == 2


class Away(BatchStore):
    """A store whose database cannot be reached for a time."""

    asked = 0

    async def unfinished(self) -> list[BatchRow]:
        Away.asked += 1
        if Away.asked <= 10:
            raise LedgerUnavailable("the database is away")
        return await super().unfinished()


async def test_a_database_that_is_away_is_logged_once_and_so_is_its_return(rig: BatchRig) -> None:
    rig.store_type = Away
    with structlog.testing.capture_logs() as log:
        async with rig.gateway(Lines()):
            await until_true(lambda: Away.asked > 12)
    assert [one["event"] for one in log] == [
        "batches wait for the database",
        "batches go on: the database is back",
    ]


async def test_another_gateway_takes_over_the_lines_of_one_that_is_gone(rig: BatchRig) -> None:
    stuck, lines = Lines(holds=True), Lines()
    async with rig.gateway(stuck, Engines(4, stuck), "gone") as batches:
        batch_id = await rig.create_batch(batches, 10)
        await until_true(lambda: len(stuck.at_work) >= 4)
        stuck.is_ready = False
        # A killed process leaves claims that no gateway renews or releases.
        claimed = list(stuck.at_work)
        async with rig.gateway(lines, owner="b") as others:
            await until_true(lambda: len(lines.tries) == 10 - len(claimed))
            await asyncio.sleep(0.1)
            assert not set(lines.tries) & set(claimed)
            rig.now += LEASE_S + 1
            done = await until(others, batch_id, "completed")
            stuck.holds = False  # the first gateway was only slow: its results come too late
            await until_true(lambda: not stuck.at_work)
    assert done["request_counts"]["completed"] == 10
    assert set((await rig.rows()).values()) == {1}
    assert all(lines.tries[number] == 1 for number in claimed)


async def test_a_line_that_another_gateway_took_over_and_gave_back_is_not_run_twice_at_once(
    rig: BatchRig,
) -> None:
    lines, other = Lines(holds=True), rig.files("b").store
    async with rig.gateway(lines) as batches:
        batch_id = await rig.create_batch(batches, 1)
        await until_true(lambda: bool(lines.at_work))
        lines.is_ready = False  # it takes no further lines, and has not renewed its claim
        rig.now += LEASE_S + 1
        [line] = await other.claim_lines(batch_id, rig.now, rig.now + LEASE_S, 1)
        await other.give_back(line)
        lines.is_ready = True
        await asyncio.sleep(0.2)
        lines.holds = False
        done = await until(batches, batch_id, "completed")
    await other.close()
    assert done["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
    assert lines.tries == {1: 1}


async def test_lines_are_not_taken_over_from_a_gateway_that_could_not_reach_the_database_either(
    rig: BatchRig,
) -> None:
    stuck, lines = Lines(holds=True), Lines()
    async with rig.gateway(stuck, owner="x") as batches:
        batch_id = await rig.create_batch(batches, 1)
        await until_true(lambda: bool(stuck.at_work))
        stuck.is_ready = False
        rig.store_type, Away.asked = Away, 0
        async with rig.gateway(lines, owner="b"):
            await until_true(lambda: Away.asked > 2)
            rig.now += LEASE_S + 1
            await until_true(lambda: Away.asked > 15)
            await asyncio.sleep(0.1)
            assert not lines.tries
        stuck.is_ready, stuck.holds = True, False
        await until(batches, batch_id, "completed")


async def test_a_line_that_was_running_when_many_gateways_ended_fails(rig: BatchRig) -> None:
    files = rig.files("x")
    async with rig.gateway(Lines(is_ready=False)) as batches:
        batch_id = await rig.create_batch(batches, 1)
        await until(batches, batch_id, "in_progress")
    for _ in range(MAX_TAKEOVERS + 1):
        [line] = await files.store.claim_lines(batch_id, rig.now, rig.now + 1, 9)
        rig.now += 2
    assert line.takeovers == MAX_TAKEOVERS
    lines = Lines()
    async with rig.gateway(lines) as batches:
        done = await until(batches, batch_id, "completed")
        [error] = results(batches, done["error_file_id"]).values()
    await files.store.close()
    assert error["response"]["body"]["error"]["code"] == "line_failed"
    assert not lines.tries


async def test_a_cancelled_batch_starts_nothing_and_keeps_what_it_has(rig: BatchRig) -> None:
    lines = Lines()
    engines = Engines(2, lines)

    def outcome(line: BatchLine, attempt: int) -> LineOutcome:
        lines.holds = True
        return answered(line, attempt)

    lines.outcome = outcome
    async with rig.gateway(lines, engines) as batches:
        batch_id = await rig.create_batch(batches, 10)
        await until_true(lambda: lines.holds and len(lines.at_work) >= 1)
        assert (await batches.cancel("acme", batch_id))["status"] == "cancelling"
        ended = await until(batches, batch_id, "cancelled")
        output, errors = (results(batches, ended[f"{kind}_file_id"]) for kind in ("output", "error"))
        assert (await batches.cancel("acme", batch_id))["status"] == "cancelled"
    assert output and output.keys() | errors.keys() == {f"r{number}" for number in range(1, 11)}
    assert {one["error"]["code"] for one in errors.values()} == {"batch_cancelled"}
    assert ended["request_counts"] == {"total": 10, "completed": len(output), "failed": 0}
    assert len(await rig.rows()) == len(output)


async def test_a_batch_whose_validation_ends_while_it_is_cancelled_keeps_its_model(rig: BatchRig) -> None:
    class ValidatedMeanwhile(BatchStore):
        async def get(self, tenant: str, batch_id: str) -> BatchRow | None:
            row = await super().get(tenant, batch_id)
            assert row is not None
            body = with_changes(row.body, model="demo", in_progress_at=5)
            await self.change(batch_id, ("validating",), status="in_progress", body=body)
            return row

    rig.store_type = ValidatedMeanwhile
    batches = Batches(rig.files())
    shown = await batches.cancel("acme", await rig.create_batch(batches, 1))
    assert (shown["status"], shown["model"], shown["in_progress_at"]) == ("cancelling", "demo", 5)
    await batches.files.store.close()


async def test_a_batch_that_is_cancelled_while_it_is_validated_counts_its_lines(rig: BatchRig) -> None:
    begun, may_end = threading.Event(), threading.Event()

    class ChecksSlowly(Lines):
        def fault(self, batch: BatchRow, body: bytes) -> LineFault | None:
            begun.set()
            may_end.wait(60)
            return None

    async with rig.gateway(ChecksSlowly()) as batches:
        batch_id = await rig.create_batch(batches, 2)
        await until_true(begun.is_set)
        await batches.cancel("acme", batch_id)
        may_end.set()
        ended = await until(batches, batch_id, "cancelled")
        assert results(batches, ended["error_file_id"]).keys() == {"r1", "r2"}
    assert ended["request_counts"] == {"total": 2, "completed": 0, "failed": 0}


async def test_lines_that_are_stored_just_before_a_cancelled_batch_is_finished_are_in_its_error_file(
    rig: BatchRig,
) -> None:
    class ValidatedElsewhere(BatchStore):
        async def claim(self, batch_id: str, was: str, now: float, until: float) -> bool:
            if was != "cancelling":
                return False  # another gateway validates it
            await self.set_lines(batch_id, [BatchLine(batch_id, 0, 1, "r1", 0, 9)])
            return await super().claim(batch_id, was, now, until)

    rig.store_type = ValidatedElsewhere
    async with rig.gateway(Lines()) as batches:
        batch_id = await rig.create_batch(batches, 1)
        await batches.cancel("acme", batch_id)
        ended = await until(batches, batch_id, "cancelled")
        assert results(batches, ended["error_file_id"]).keys() == {"r1"}
    assert ended["request_counts"]["total"] == 1


async def test_a_line_that_ends_while_another_one_is_given_back_is_given_back_too(rig: BatchRig) -> None:
    begun = asyncio.Event()

    class LeavesLate(Lines):
        async def run(self, batch: BatchRow, line: BatchLine, body: bytes) -> LineOutcome:
            try:
                return await super().run(batch, line, body)
            finally:
                if line.number == 2:
                    await begun.wait()

    class TakesTime(BatchStore):
        async def give_back(self, line: BatchLine, failures: int = 0) -> None:
            begun.set()
            await asyncio.sleep(0.1)  # the other line ends meanwhile
            await super().give_back(line, failures)

    rig.store_type = TakesTime
    lines = LeavesLate(holds=True)
    async with rig.gateway(lines, Engines(2, lines)) as batches:
        batch_id = await rig.create_batch(batches, 2)
        await until_true(lambda: lines.at_work == {1, 2})
        await batches.cancel("acme", batch_id)
        ended = await until(batches, batch_id, "cancelled")
    assert ended["request_counts"] == {"total": 2, "completed": 0, "failed": 0}


async def test_lines_that_did_not_run_in_the_window_expire(rig: BatchRig) -> None:
    async with rig.gateway(Lines(is_ready=False)) as batches:
        batch_id = await rig.create_batch(batches, 2, completion_window="30m")
        await until(batches, batch_id, "in_progress")
        rig.now += 1_801
        ended = await until(batches, batch_id, "expired")
        errors = results(batches, ended["error_file_id"])
    assert {one["error"]["code"] for one in errors.values()} == {"batch_expired"}
    assert ended["request_counts"] == {"total": 2, "completed": 0, "failed": 0}
    assert ended["expired_at"] and ended["output_file_id"] is None


class OutOfOrder(LocalFiles):
    """Gives no content while ``fails`` is set."""

    fails = True

    def chunks(self, file_id: str, start: int = 0, size: int | None = None) -> Iterator[bytes]:
        if self.fails:
            raise OSError("the storage does not answer")
        return super().chunks(file_id, start, size)


async def test_a_batch_that_was_not_validated_in_its_window_expires(rig: BatchRig) -> None:
    rig.storage_type = OutOfOrder
    async with rig.gateway(Lines()) as batches:
        batch_id = await rig.create_batch(batches, 2, completion_window="30m")
        rig.now += 1_801
        ended = await until(batches, batch_id, "expired")
    assert (ended["output_file_id"], ended["error_file_id"], ended["request_counts"]["total"]) == (
        None,
        None,
        0,
    )


async def test_a_batch_whose_validation_failed_for_now_is_validated_again_while_lines_run(
    rig: BatchRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gateway renewed the claim with those of its lines, and never took it again."""
    monkeypatch.setattr("gateway.batches.runner.KEEP_S", 0.02)
    rig.storage_type, lines = OutOfOrder, Lines(holds=True)
    async with rig.gateway(lines, Engines(2, lines)) as batches:
        storage = batches.files.storage
        assert isinstance(storage, OutOfOrder)
        storage.fails = False
        await rig.create_batch(batches, 2)
        await until_true(lambda: len(lines.at_work) == 2)
        storage.fails = True
        with structlog.testing.capture_logs() as logs:
            batch_id = await rig.create_batch(batches, 2)
            await until_true(lambda: any(one["event"] == "batch waits" for one in logs))
        storage.fails = False
        for _ in range(3):
            assert (await batches.show("acme", batch_id))["status"] == "validating"
            rig.now += LEASE_S / 2 - 1
            await asyncio.sleep(0.1)
        await until(batches, batch_id, "in_progress")
        lines.holds = False
    assert max(lines.tries.values()) == 1, "the claims of the lines are kept"


@pytest.mark.parametrize(
    ("speed", "told"),
    [
        (
            0.006,
            "about 50 lines end before the batch does, which takes 3h now; ask for .* of 3h or more",
        ),
        (0.000_01, "ask for fewer lines, or later"),
    ],
)
async def test_a_window_that_cannot_be_kept_is_refused_with_the_time_it_takes(
    rig: BatchRig, speed: float, told: str
) -> None:
    files = rig.files()
    file = await rig.upload(files, 50)
    slow = Batches(files, lambda: speed)
    asked = BatchBody(input_file_id=file.file_id, endpoint=CHAT, completion_window="2h")
    with pytest.raises(WindowTooShort, match=told):
        await slow.create(ACME, "batch_s", asked)
    with pytest.raises(NotFound):
        await slow.show("acme", "batch_s")
    await files.store.close()


async def test_a_window_is_judged_by_the_number_of_lines_not_by_their_length(rig: BatchRig) -> None:
    files = rig.files()
    await rig.create_batch(Batches(files, lambda: 0.01), 40, completion_window="2h", note="x" * 4_000)
    await files.store.close()


async def test_a_small_batch_waits_for_its_turns_not_for_all_lines_of_another_tenant(rig: BatchRig) -> None:
    """Each gateway that runs lines counts, and of another tenant's lines as many as the batch has."""
    lines = Lines(holds=True)
    async with rig.gateway(lines, Engines(2, lines)) as batches:
        await rig.create_batch(batches, 60)
        await until_true(lambda: len(lines.at_work) == 2)
        file = await rig.upload(batches.files, 5, tenant="tiny")
        asked = BatchBody(input_file_id=file.file_id, endpoint=CHAT, completion_window="1h")
        tiny = replace(ACME, tenant="tiny")
        with pytest.raises(WindowTooShort, match=r"about 10 lines .* takes 84m"):
            await Batches(batches.files, lambda: 0.002).create(tiny, "batch_t", asked)
        async with rig.gateway(lines, Engines(4, lines), owner="b"):
            await until_true(lambda: len(lines.at_work) == 4)
            await Batches(batches.files, lambda: 0.002).create(tiny, "batch_t", asked)
        lines.holds = False


class TakesTime(Lines):
    """Takes 50 ms for a line."""

    async def run(self, batch: BatchRow, line: BatchLine, body: bytes) -> LineOutcome:
        self.at_work.add(line.number)
        await asyncio.sleep(0.05)
        return await super().run(batch, line, body)


async def test_the_rate_of_lines_is_their_number_over_the_time_in_which_they_take_all_capacity(
    rig: BatchRig,
) -> None:
    """Two lines that ended at almost the same time counted as thousands a second."""
    lines = TakesTime()
    async with rig.gateway(lines, Engines(2, lines)) as batches:
        for count in (1, 1):
            await until(batches, await rig.create_batch(batches, count), "completed")
        assert batches.lines_per_s() is None, "nothing runs"
        batch_id = await rig.create_batch(batches, 60)
        await until_true(lambda: len(lines.order) >= 50)
        rate = batches.lines_per_s()
        await until(batches, batch_id, "completed")
        await until_true(lambda: batches.lines_per_s() is None)
    assert rate is not None and 4 < rate < 50  # 40 at most, and less on a busy machine


async def test_the_lines_of_a_batch_that_has_ended_are_no_longer_in_the_database_and_its_counts_are(
    rig: BatchRig,
) -> None:
    async with rig.gateway(Lines()) as batches:
        batch_id = await rig.create_batch(batches, 3)
        await until(batches, batch_id, "completed")
        store = batches.files.store
        async with asyncio.timeout(30):
            while (await store.counts(batch_id)).by_status:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        shown = (await batches.page("acme", after=None, limit=1))[0]
    assert shown["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    assert (shown["usage"]["input_tokens"], shown["usage"]["output_tokens"]) == (30, 6)


class OutrunStore(BatchStore):
    """Another gateway writes the result files and ends the batch while this one reads the second page."""

    other: Files | None = None

    async def results(
        self, batch_id: str, statuses: Sequence[str], after: int, limit: int
    ) -> list[tuple[int, int, str, bytes | None]]:
        if after and self.other is not None:
            other, self.other = self.other, None
            [batch] = await other.store.unfinished()
            await finish(other, batch)
        return await super().results(batch_id, statuses, after, limit)


async def test_result_files_that_another_gateway_has_written_meanwhile_stay_whole(
    rig: BatchRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "PAGE", 1)
    other, rig.store_type = rig.files("b"), OutrunStore
    async with rig.gateway(Lines()) as batches:
        store = batches.files.store
        assert isinstance(store, OutrunStore)
        store.other = other
        shown = await until(batches, await rig.create_batch(batches, 3), "completed")
        await until_true(lambda: store.other is None)
        await asyncio.sleep(0.2)  # it reads the rest
        assert len(results(batches, shown["output_file_id"])) == 3
    await other.store.close()


async def test_a_tenants_batches_that_have_not_ended_are_bounded_in_number(rig: BatchRig) -> None:
    files = rig.files()
    batches = Batches(files, max_unfinished=2)
    first = await rig.create_batch(batches, 1)
    await rig.create_batch(batches, 1)
    with pytest.raises(QuotaExceeded, match="2 batches of the tenant have not ended"):
        await rig.create_batch(batches, 1)
    await files.store.change(first, ("validating",), status="cancelled")
    await rig.create_batch(batches, 1)
    await files.store.close()


class CountsBatches(BatchStore):
    """Lets nobody read the unfinished batches of all tenants."""

    async def unfinished(self) -> list[BatchRow]:
        raise AssertionError("all unfinished batches are read")


async def test_the_bound_of_a_tenants_batches_is_checked_without_reading_those_of_all_tenants(
    rig: BatchRig,
) -> None:
    rig.store_type = CountsBatches
    files = rig.files()
    batches = Batches(files, max_unfinished=1)
    first = await batches.show("acme", await rig.create_batch(batches, 1))
    file = await files.add("umbra", "file-u", "in.jsonl", "batch", io.BytesIO(b"{}"), 2)
    body = BatchBody(input_file_id=file.file_id, endpoint=CHAT, completion_window="24h")
    await batches.create(Caller("umbra", CallerRole.CALLER, "key_2"), "batch_u", body)
    with pytest.raises(QuotaExceeded):
        await rig.create_batch(batches, 1)
    assert first["status"] == "validating"
    await files.store.close()


async def test_a_file_is_not_deleted_under_a_batch_and_expires_later(rig: BatchRig) -> None:
    async with rig.gateway(Lines(is_ready=False)) as batches:
        batch_id = await rig.create_batch(batches, 1)
        [row] = await batches.files.page("acme", after=None, limit=9, purpose=None, newest=True)
        with pytest.raises(FileInUse):
            await batches.files.delete("acme", row.file_id)
        await batches.cancel("acme", batch_id)
        await until(batches, batch_id, "cancelled")
        rig.now += rig.section.keep_seconds + 1
        await batches.files.sweep()
        assert await batches.files.page("acme", after=None, limit=9, purpose=None, newest=True) == []
    assert not any(one.is_file() for one in rig.folder.glob("files/*/*"))


async def test_a_file_that_expires_under_a_batch_is_kept_until_the_batch_has_ended(rig: BatchRig) -> None:
    lines = Lines(is_ready=False)
    async with rig.gateway(lines) as batches:
        file = await rig.upload(batches.files, 2)
        rig.now += rig.section.keep_seconds - 60
        asked = BatchBody(input_file_id=file.file_id, endpoint=CHAT, completion_window="24h")
        await batches.create(ACME, "batch_late", asked)
        rig.now += 3_600
        await batches.files.sweep()
        lines.is_ready = True
        ended = await until(batches, "batch_late", "completed")
        assert ended["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
        await batches.files.sweep()
        with pytest.raises(FileNotFoundError):
            list(batches.files.storage.chunks(file.file_id))


async def test_a_batch_is_forgotten_once_its_results_can_only_have_expired(rig: BatchRig) -> None:
    async with rig.gateway(Lines()) as batches:
        done = await rig.create_batch(batches, 1)
        await until(batches, done, "completed")
    files = rig.files()
    batches = Batches(files)
    unfinished = await rig.create_batch(batches, 1)
    for later_s, known in ((31 * 86_400, [unfinished, done]), (7_200, [unfinished])):
        rig.now += later_s
        await files.sweep()
        assert [one["id"] for one in await batches.page("acme", after=None, limit=9)] == known
    await files.store.close()


async def test_tenants_take_turns(rig: BatchRig) -> None:
    class Tenants(Lines):
        tenants: list[str] = []  # noqa: RUF012 - of this test alone

        async def run(self, batch: BatchRow, line: BatchLine, body: bytes) -> LineOutcome:
            self.tenants.append(batch.tenant)
            return await super().run(batch, line, body)

    lines = Tenants(holds=True)
    engines = Engines(0, lines)
    async with rig.gateway(lines, engines) as batches:
        first = await rig.create_batch(batches, 30)
        await until(batches, first, "in_progress")
        store = batches.files.store
        row = await store.get("acme", first)
        assert row is not None
        file = await rig.upload(batches.files, 4)
        other = BatchBody(input_file_id=file.file_id, endpoint=CHAT, completion_window="24h")
        globex = Caller("globex", CallerRole.CALLER, "key_2")
        content = b"".join(batches.files.storage.chunks(file.file_id))
        await batches.files.add("globex", "file-gx", "in.jsonl", "batch", io.BytesIO(content), len(content))
        await batches.create(globex, "batch_g", other.model_copy(update={"input_file_id": "file-gx"}))
        await until(batches, "batch_g", "in_progress", tenant="globex")
        await asyncio.sleep(0.1)
        engines.places = 6
        await until_true(lambda: len(lines.tenants) >= 6)
    assert Counter(lines.tenants[:6]) == {"acme": 3, "globex": 3}


async def test_a_file_whose_content_cannot_be_deleted_now_is_gone_and_its_content_is_swept_later(
    tmp_path: Path,
) -> None:
    class Storage(LocalFiles):
        stuck = True

        def delete(self, file_id: str) -> None:
            if self.stuck:
                raise OSError("the storage does not answer")
            super().delete(file_id)

    rig = BatchRig(tmp_path)
    storage = Storage(tmp_path / "files")
    section = BatchesSection(folder=str(tmp_path / "files"), max_tenant_bytes=1_024)
    files = Files(BatchStore(rig.url, "a"), storage, section, lambda: rig.now)
    await files.add("acme", "file-aa", "a.txt", "user_data", io.BytesIO(b"first"), 5)
    await files.delete("acme", "file-aa")
    with pytest.raises(NotFound):
        await files.get("acme", "file-aa")
    with pytest.raises(QuotaExceeded):
        await files.add("acme", "file-bb", "b.txt", "user_data", io.BytesIO(b"x" * 2_000), 2_000)
    storage.stuck = False
    rig.now += 90_000
    await files.sweep()
    assert not any(one.is_file() for one in (tmp_path / "files").glob("*/*"))
    await files.store.close()


async def test_contents_without_a_row_are_swept_after_a_day(tmp_path: Path) -> None:
    rig = BatchRig(tmp_path)
    files = rig.files()
    file = await rig.upload(files, 1)
    files.storage.put("file-ff", io.BytesIO(b"of an upload whose gateway was killed"))
    await files.sweep()
    rig.now += 86_000
    await files.sweep()
    assert b"".join(files.storage.chunks("file-ff"))
    rig.now += 4_000
    await files.sweep()
    with pytest.raises(FileNotFoundError):
        list(files.storage.chunks("file-ff"))
    assert b"".join(files.storage.chunks(file.file_id))
    await files.store.close()
