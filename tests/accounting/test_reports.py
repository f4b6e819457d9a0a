"""Sums and pages of the ledger, on every database that it supports."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Select, select, text
from sqlalchemy.ext.asyncio import create_async_engine

import accounting.shadow_pairs  # noqa: F401 - its table is one of the ledger's
from accounting.batch_tables import BatchLine, BatchRow
from accounting.batches import BatchStore
from accounting.errors import LedgerUnavailable
from accounting.ledger import Ledger
from accounting.options import LedgerOptions
from accounting.reports import DIMENSIONS, Page, Span, UsageReport
from accounting.store import GenerationStore
from accounting.store_schema import HEAD, VERSIONS, bring_up
from accounting.stored_responses import ResponseStore, StoredResponse
from accounting.tables import generations, metadata
from accounting.values import UsageRow
from benchmarks.ledger_postgres import NoPostgres, postgres
from gateway.admin.usage import RowsQuery, UsageAdmin
from tests.accounting.test_ledger import Events, ledger_for, row, running, until, url_of
from tests.usage_rows import newest_rows

DAY = 86_400.0
MIDNIGHT = 1_700_006_400.0  # 2023-11-15


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The URL of a PostgreSQL server for this module only."""
    try:
        with postgres() as running_server:
            yield running_server.url
    except NoPostgres as error:
        pytest.fail(f"the tests need PostgreSQL's programs: {error}")


@pytest.fixture(params=["sqlite", "postgresql"])
async def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty ledger."""
    if request.param == "sqlite":
        return url_of(tmp_path / "l.db")
    place: str = request.getfixturevalue("server")
    async with running(ledger_for(place, Events())):
        await run_sql(place, "TRUNCATE generations")
    return place


@pytest.fixture
async def bare(url: str) -> str:
    """The URL of a database without the ledger's tables."""
    if url.startswith("postgresql"):
        await run_sql(url, "DROP SCHEMA public CASCADE", "CREATE SCHEMA public")
    return url


async def run_sql(url: str, *statements: str) -> list[tuple[object, ...]]:
    engine = create_async_engine(url)
    found: list[tuple[object, ...]] = []
    async with engine.begin() as connection:
        for statement in statements:
            result = await connection.execute(text(statement))
            found = [tuple(line) for line in result] if result.returns_rows else []
    await engine.dispose()
    return found


@asynccontextmanager
async def holding(url: str, *rows: UsageRow) -> AsyncIterator[Ledger]:
    async with running(ledger_for(url, Events())) as ledger:
        for one in rows:
            ledger.append(one)
        await until(lambda: ledger.depth == 0)
        yield ledger


async def lines(ledger: Ledger, *by: str, **more: object) -> list[dict[str, object]]:
    report = UsageReport(by, **more)  # type: ignore[arg-type]
    return [report.line(line) for line in await ledger.select(report.query())]


def used(generation_id: str, tenant: str, **more: object) -> UsageRow:
    tokens = {"input_tokens": 10, "output_tokens": 4, "cached_tokens": 6, "started_at": MIDNIGHT}
    made = row(
        generation_id, tenant=tenant, **{"cost_nanousd": 2**40, "price_version": "v1", **tokens, **more}
    )
    return made.delivered()


async def test_sums_are_by_what_was_asked_and_margin_is_what_was_billed_but_not_computed(url: str) -> None:
    rows = [
        used("g1", "acme", adapter_id="manga", backend_name="local"),
        used("g2", "acme", started_at=MIDNIGHT - 0.001, backend_name="local"),
        used("g3", "acme", started_at=MIDNIGHT + DAY - 0.001, adapter_id="manga", backend_name="local"),
        used("g4", "zen", backend_name="bedrock"),
    ]
    sums = {
        "input_tokens": 10,
        "output_tokens": 4,
        "cached_tokens": 6,
        "billed_tokens": 14,
        "computed_tokens": 8,
    }
    one = {"requests": 1, **sums, "cost_nanousd": 2**40, "unpriced_tokens": 0, "margin_tokens": 6}
    two = {name: 2 * value for name, value in one.items()}
    async with holding(url, *rows) as ledger:
        assert await lines(ledger, "tenant", "adapter", "backend", "day") == [
            {"tenant": "acme", "adapter": None, "backend": "local", "day": "2023-11-14", **one},
            {"tenant": "acme", "adapter": "manga", "backend": "local", "day": "2023-11-15", **two},
            {"tenant": "zen", "adapter": None, "backend": "bedrock", "day": "2023-11-15", **one},
        ] or url.startswith("postgresql")  # PostgreSQL sorts NULL last
        assert await lines(ledger, "day") == [
            {"day": "2023-11-14", **one},
            {"day": "2023-11-15", **{name: 3 * value for name, value in one.items()}},
        ]


async def test_tokens_without_a_price_are_told_from_tokens_that_cost_nothing(url: str) -> None:
    rows = [
        used("g1", "acme", cost_nanousd=0),
        used("g2", "acme", cost_nanousd=0, price_version=None),
        used(
            "g3", "zen", cost_nanousd=0, price_version=None, input_tokens=0, output_tokens=0, cached_tokens=0
        ),
    ]
    async with holding(url, *rows) as ledger:
        found = await lines(ledger, "tenant")
        assert [(line["tenant"], line["unpriced_tokens"]) for line in found] == [("acme", 14), ("zen", 0)]


async def test_a_span_includes_since_and_excludes_until(url: str) -> None:
    rows = [used(f"g{at}", "acme", started_at=MIDNIGHT + at) for at in (0.0, 5.0, 10.0)]
    async with holding(url, *rows) as ledger:
        found = await lines(ledger, "tenant", span=Span(MIDNIGHT, MIDNIGHT + 10))
        assert [line["requests"] for line in found] == [2]


async def test_shadow_traffic_is_in_no_tenants_usage_but_in_a_report_of_its_own(url: str) -> None:
    rows = [used("g1", "acme"), row("g2", kind="shadow", started_at=MIDNIGHT, input_tokens=99)]
    async with holding(url, *rows) as ledger:
        assert [line["input_tokens"] for line in await lines(ledger, "tenant")] == [10]
        [shadow] = await lines(ledger, "tenant", kind="shadow")
        assert (shadow["input_tokens"], shadow["billed_tokens"]) == (99, 0)


async def test_usage_can_be_grouped_by_every_dimension(url: str) -> None:
    async with holding(url, used("g1", "acme", org="o", user_id="u", model="m")) as ledger:
        [line] = await lines(ledger, *DIMENSIONS)
        assert line["hour"] == "2023-11-15T00:00+00:00"
        assert (line["org"], line["user"], line["model"], line["key"]) == ("o", "u", "m", "k1")


async def test_pages_give_every_row_once_in_order_even_of_one_moment(url: str) -> None:
    rows = [used(f"g{number}", "acme", started_at=MIDNIGHT + number // 4) for number in range(10)]
    async with holding(url, *reversed(rows)) as ledger:
        found, after = [], None
        while page := await ledger.select(Page(Span(), 3, after).query()):
            found += [line["generation_id"] for line in page]
            after = (page[-1]["started_at"], page[-1]["generation_id"])
        assert found == [one.generation_id for one in rows]


# Sums of whole days

LINES = st.fixed_dictionaries(
    {
        "started_at": st.sampled_from(
            [MIDNIGHT + DAY * day + at for day in range(3) for at in (0.0, 40_000.0, DAY - 0.001)]
        ),
        "kind": st.sampled_from(["request", "shadow"]),
        "tenant": st.sampled_from(["acme", "zen"]),
        "org": st.sampled_from([None, "", "o"]),
        "user_id": st.sampled_from([None, "", "u"]),
        "key_id": st.sampled_from(["k1", "k2"]),
        "model": st.sampled_from([None, "m"]),
        "route": st.sampled_from(["main", "other"]),
        "adapter_id": st.sampled_from([None, "a"]),
        "backend_name": st.sampled_from([None, "local"]),
        "price_version": st.sampled_from([None, "v1"]),
        "cost_nanousd": st.integers(0, 9),
        "input_tokens": st.integers(0, 9),
    }
)
# Steps: rows are written in any order of time; one is corrected or deleted by hand; a day is summed.
STEPS = st.lists(
    st.one_of(
        st.lists(LINES, max_size=4), st.sampled_from(["corrected", "moved", "deleted", "summed", "again"])
    ),
    max_size=8,
)
SPANS = [
    Span(None if since is None else MIDNIGHT + since, None if until is None else MIDNIGHT + until)
    for since in (None, 0.0, 40_000.0, DAY)
    for until in (None, DAY + 1.0, 2 * DAY)
]


GROUPS = [
    (), ("tenant", "model", "day"), ("key", "org"), ("user", "day"), ("route", "adapter"), ("backend",),
    ("user", "tenant"), ("hour",),
]  # fmt: skip


@given(steps=STEPS, span=st.sampled_from(SPANS))
@settings(suppress_health_check=list(HealthCheck), deadline=None, max_examples=12)
async def test_reports_are_the_sums_of_the_rows_whatever_was_summed_up_before(
    url: str, steps: list[list[dict[str, object]] | str], span: Span
) -> None:
    store = GenerationStore(url)
    store.connect()
    await store.prepare()
    await run_sql(url, "DELETE FROM generations", "DELETE FROM usage_sums", "DELETE FROM open_days")
    by_hand = {
        "corrected": "UPDATE generations SET cost_nanousd = cost_nanousd + 1, tenant = 'zen'",
        "moved": f"UPDATE generations SET hour = hour + 24, started_at = started_at + {DAY}",
        "deleted": "DELETE FROM generations",
    }
    rows: list[UsageRow] = []
    for step in steps:
        if isinstance(step, list):
            made = [row(f"g{len(rows) + place}", **line).delivered() for place, line in enumerate(step)]
            rows += made
            await store.write(made)
        elif step == "again":
            await store.write(rows[-2:])
        elif step == "summed":
            await store.sum_a_day(int(MIDNIGHT // DAY) + 2)
        else:
            chosen = "SELECT generation_id FROM generations ORDER BY generation_id LIMIT 1"
            await run_sql(url, f"{by_hand[step]} WHERE generation_id IN ({chosen})")
    found = await store.select(select(generations))
    inside = [
        {
            **one,
            "user": one["user_id"],
            "key": one["key_id"],
            "adapter": one["adapter_id"],
            "backend": one["backend_name"],
            "day": one["hour"] // 24,
        }
        for one in found
        if one["kind"] == "request" and (span.since or 0) <= one["started_at"] < (span.until or math.inf)
    ]
    for by in GROUPS:
        wanted: Counter[tuple[object, ...]] = Counter()
        for one in inside:
            key = tuple(one[name] for name in by)
            unpriced = one["input_tokens"] if one["price_version"] is None else 0
            wanted.update({(*key, "requests"): 1, (*key, "unpriced_tokens"): unpriced})
            wanted.update({(*key, name): one[name] for name in ("input_tokens", "cost_nanousd")})
        reported = [line for line in await store.select(UsageReport(by, span).query()) if line["requests"]]
        sums = ("requests", "unpriced_tokens", "input_tokens", "cost_nanousd")
        assert wanted == {
            (*(line[f"by_{name}"] for name in by), name): line[name] for line in reported for name in sums
        }
    await store.close(None)


async def test_a_ledger_sums_up_the_days_that_are_over_and_a_late_row_is_in_the_next_report(url: str) -> None:
    options = LedgerOptions(
        emit=Events().append, clock=time.monotonic, unix_time=lambda: MIDNIGHT + 1, sum_s=0.01
    )
    store = GenerationStore(url)
    store.connect()

    async def summed() -> list[tuple[object, ...]]:
        return await run_sql(
            url, "SELECT day, SUM(requests) FROM usage_sums WHERE cube = 'user' GROUP BY day"
        )

    async with running(Ledger(url, options)) as ledger:
        for place, started_at in enumerate((MIDNIGHT - 2, MIDNIGHT - DAY - 1, MIDNIGHT)):
            ledger.append(used(f"g{place}", "acme", started_at=started_at))
        await until(lambda: ledger.depth == 0)
        today = int(MIDNIGHT // DAY)
        async with asyncio.timeout(60):
            while sorted(await summed()) != [(today - 2 + place, 1) for place in (0, 1)]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        ledger.append(used("late", "acme", started_at=MIDNIGHT - 1))
        await until(lambda: ledger.depth == 0)
        assert [line["requests"] for line in await lines(ledger, "tenant")] == [4]
    await store.close(None)


# Migrations

LATER = Path(__file__).parent / "later_migrations"


async def upgrade(url: str) -> None:
    """Run the migrations of the next version, which has a further revision."""
    engine = create_async_engine(url)
    await bring_up(engine, head="later", versions=(VERSIONS, str(LATER)))
    await engine.dispose()


async def test_a_later_version_upgrades_the_tables_and_keeps_their_rows(bare: str) -> None:
    async with holding(bare, used("old", "acme", revision=3, ttft_ms=1.5)) as ledger:
        before = await newest_rows(ledger)
    await upgrade(bare)
    assert await run_sql(bare, "SELECT version_num FROM ledger_version") == [("later",)]
    assert await run_sql(bare, "SELECT generation_id, added FROM generations") == [("old", 0)]
    async with running(ledger_for(bare, Events())) as ledger:
        assert await newest_rows(ledger) == before


async def test_a_gateway_of_the_version_before_an_upgrade_can_still_write(bare: str) -> None:
    async with holding(bare, used("first", "acme")):
        await upgrade(bare)
    async with holding(bare, used("second", "acme")) as ledger:
        assert {one.generation_id for one in await newest_rows(ledger)} == {"first", "second"}
    assert await run_sql(bare, "SELECT version_num FROM ledger_version") == [("later",)]


async def test_stores_that_start_together_create_the_tables_once(bare: str) -> None:
    stores = [GenerationStore(bare) for _ in range(6)]
    for store in stores:
        store.connect()

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for store in stores:
            tasks.create_task(store.prepare())
    for store in stores:
        await store.close(2.0)
    assert await run_sql(bare, "SELECT version_num FROM ledger_version") == [(HEAD,)]


async def test_the_migrations_make_the_tables_that_the_code_knows(bare: str) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    async with holding(bare):
        pass
    engine = create_async_engine(bare)
    async with engine.connect() as connection:
        options = {"version_table": "ledger_version"}
        differences = await connection.run_sync(
            lambda sync: compare_metadata(MigrationContext.configure(sync, opts=options), metadata)
        )
    await engine.dispose()
    assert differences == []


async def test_a_line_of_a_batch_is_claimed_finished_and_billed_by_one_gateway_alone(url: str) -> None:
    stores = [BatchStore(url, name) for name in "abc"]
    lines = [BatchLine("batch_1", place, place + 1, f"r{place}", 0, 9) for place in range(30)]
    batch = BatchRow(
        "batch_1", "acme", "key_1", None, "/v1/completions", "file-1", "in_progress", 1.0, 9.0, b"{}"
    )
    await stores[0].add(batch)
    await stores[0].set_lines("batch_1", lines)
    now, until_s = 100.0, 120.0

    async def claimed(store: BatchStore) -> list[BatchLine]:
        found: list[BatchLine] = []
        while more := await claim(store):
            found += more
        return found

    async def claim(store: BatchStore) -> list[BatchLine]:
        async with asyncio.timeout(60):
            while True:
                try:
                    return await store.claim_lines("batch_1", now, until_s, 4)
                except LedgerUnavailable:  # another connection holds SQLite's lock for a moment
                    await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as tasks:
        working = [tasks.create_task(claimed(store)) for store in stores]
    taken = [task.result() for task in working]
    assert sorted(one.place for lines in taken for one in lines) == list(range(30))

    holder = next(number for number, own in enumerate(taken) if own)
    line, other = taken[holder][0], stores[(holder + 1) % 3]
    bill = row("gen_batch_1_1")
    assert not await other.finish(line, "done", b"x", bill)
    late = await other.claim_lines("batch_1", until_s + 1, until_s + 20, 1)
    assert [one.takeovers for one in late] == [1]
    mine = late[0]
    previous = next(
        store for store, own in zip(stores, taken, strict=True) if mine.place in {o.place for o in own}
    )
    assert previous is other or not await previous.finish(mine, "done", b"x", bill)
    assert await other.finish(mine, "done", b"{}", bill)
    assert not await other.finish(mine, "done", b"{}", bill)
    counts = await other.counts("batch_1")
    assert (counts.of("done"), counts.of("running"), counts.tokens.input_tokens) == (1, 29, bill.input_tokens)
    assert await other.results("batch_1", ("done",), 0, 9) == [
        (mine.number, mine.place, mine.custom_id, b"{}")
    ]
    assert not await other.end_lines("batch_1", now)
    assert await other.end_lines("batch_1", until_s + 50)
    for store in stores:
        await store.close()


# A busy machine reads the server's clock, by which leases end, so much late.
LATE_S = 5.0


async def test_stored_responses_are_read_by_their_tenant_until_they_expire(url: str) -> None:
    made = StoredResponse("acme", "resp_1", None, "queued", 10.0, 100.0, b"in", b"out", None, 20.0)
    following = replace(made, response_id="resp_2", previous_id="resp_1", status="completed", created_at=11.0)
    store, other = (ResponseStore(url, tenant_bytes=10) for _ in range(2))
    try:
        await store.put(made)
        await store.put(following)
        found = await other.get("acme", "resp_1", 99.0)
        assert found is not None and found.alive_until == pytest.approx(20.0, abs=LATE_S)
        assert replace(found, alive_until=20.0) == made
        thread = await other.thread("acme", "resp_2", 99.0, most=9, most_bytes=9)
        assert [replace(one, alive_until=20.0) for one in thread] == [made, following]
        for bound in ({"most": 1, "most_bytes": 9}, {"most": 9, "most_bytes": 4}):
            thread = await other.thread("acme", "resp_2", 99.0, **bound)
            assert [replace(one, alive_until=20.0) for one in thread] == [following]
        assert await other.get("umbra", "resp_1", 99.0) is None
        assert await other.get("acme", "resp_1", 100.0) is None
        assert [one.response_id for one in await other.abandoned(21.0 + LATE_S, 9)] == ["resp_1"]
        assert await other.first_lease_end() == pytest.approx(20.0, abs=LATE_S)
        assert await other.claim(made, 21.0 + LATE_S, 40.0) and not await store.claim(
            made, 21.0 + LATE_S, 40.0
        )
        assert await other.keep_alive(made, 40.0) and not await other.abandoned(21.0 + LATE_S, 9)
        assert await other.finish(replace(made, status="failed", events=b"ev"))
        assert await other.first_lease_end() is None
        assert not await store.finish(made) and not await store.keep_alive(made, 50.0)
        await store.sweep(50.0)  # together they exceed the tenant's share: the older one is removed
        assert await other.get("acme", "resp_1", 99.0) is None
        found = await other.get("acme", "resp_2", 99.0)
        assert found is not None and replace(found, alive_until=20.0) == following
        assert await other.delete("acme", "resp_2") and not await other.delete("acme", "resp_2")
    finally:
        await store.close()
        await other.close()


@asynccontextmanager
async def no_responses(url: str) -> AsyncIterator[ResponseStore]:
    store = ResponseStore(url, tenant_bytes=10_000)
    try:
        await store.sweep(1e12)  # PostgreSQL's database has those of other tests
        yield store
    finally:
        await store.close()


def stored(number: int, **changes: Any) -> StoredResponse:
    one = StoredResponse("acme", f"resp_{number}", None, "completed", 10.0, 100.0, b"in", b"out")
    return replace(one, **changes)


@pytest.mark.parametrize(
    "most, most_bytes, oldest", [(99, 99, 0), (4, 99, 3), (7, 99, 0), (99, 20, 2), (99, 0, 6)]
)
async def test_a_conversation_is_read_up_to_its_limits(
    url: str, most: int, most_bytes: int, oldest: int
) -> None:
    turns = [
        stored(one, previous_id=f"resp_{one - 1}" if one else None, created_at=float(one)) for one in range(7)
    ]
    limits = {"most": most, "most_bytes": most_bytes}
    async with no_responses(url) as store:
        for one in turns:  # of 5 bytes each; a stream does not count
            await store.put(replace(one, events=b"events" * 9))
            await store.put(replace(one, tenant="umbra", previous_id=None))
        assert await store.thread("acme", "resp_6", 99.0, **limits) == turns[oldest:]
        await store.delete("acme", "resp_2")
        found = await store.thread("acme", "resp_6", 99.0, **limits)
        assert found == (turns[oldest:] if oldest > 2 else [])


async def test_responses_that_are_stored_at_the_same_time_share_transactions(url: str) -> None:
    async with no_responses(url) as store:
        written, transactions = store._written, 0

        async def counted(write: Any) -> Any:
            nonlocal transactions
            transactions += 1
            return await written(write)

        store._written = counted  # type: ignore[method-assign]
        async with asyncio.TaskGroup() as tasks:
            for number in range(50):
                tasks.create_task(store.put(stored(number)))
        for number in range(50):
            assert await store.get("acme", f"resp_{number}", 50.0) == stored(number)
        assert transactions <= 3


async def test_a_response_that_cannot_be_stored_fails_alone(url: str) -> None:
    bad = stored(2, tenant="\ud800")
    async with no_responses(url) as store:
        async with asyncio.TaskGroup() as tasks:
            puts = [tasks.create_task(_failure_of(store.put(one))) for one in (stored(0), stored(1), bad)]
        assert [one.result() for one in puts[:2]] == [None, None]
        assert puts[2].result() is not None
        assert await store.get("acme", "resp_1", 50.0) == stored(1)


async def test_a_caller_who_leaves_while_responses_are_stored_takes_none_with_him(url: str) -> None:
    async with no_responses(url) as store:
        for number in range(0, 40, 4):
            async with asyncio.TaskGroup() as tasks:
                puts = [tasks.create_task(store.put(stored(number + one))) for one in range(4)]
                await asyncio.sleep(number / 10_000)
                puts[0].cancel()
            for one in range(1, 4):
                found = await store.get("acme", f"resp_{number + one}", 50.0)
                assert found == stored(number + one)


async def _failure_of(put: Awaitable[None]) -> Exception | None:
    try:
        await put
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("ahead_s", [60.0, -60.0])
async def test_a_gateway_whose_clock_is_wrong_takes_no_live_lease_and_takes_those_that_are_over(
    server: str, ahead_s: float
) -> None:
    name, right = f"{ahead_s:+g}", time.time

    def wrong() -> float:
        return time.time() + ahead_s

    lines, other_lines = BatchStore(server, f"a{name}", right), BatchStore(server, f"b{name}", wrong)
    answers, other_answers = (ResponseStore(server, tenant_bytes=99, unix_time=at) for at in (right, wrong))
    made = StoredResponse("acme", f"resp_{name}", None, "queued", 1.0, 1e12, b"", b"", None, right() + 15.0)
    batch = BatchRow(f"b{name}", "acme", "key_1", None, "/v1/completions", "f", "validating", 1.0, 9.0, b"{}")
    try:
        await lines.add(batch)
        await lines.set_lines(batch.batch_id, [BatchLine(batch.batch_id, 0, 1, "r", 0, 9)])
        await answers.put(made)
        assert await lines.claim(batch.batch_id, "validating", right(), right() + 20)
        assert len(await lines.claim_lines(batch.batch_id, right(), right() + 20, 9)) == 1

        assert not await other_lines.claim(batch.batch_id, "validating", wrong(), wrong() + 20)
        assert await other_lines.claim_lines(batch.batch_id, wrong(), wrong() + 20, 9) == []
        assert not await other_lines.end_lines(batch.batch_id, wrong())
        assert not await other_answers.abandoned(wrong(), 9)
        assert not await other_answers.claim(made, wrong(), wrong() + 15)
        first = await other_answers.first_lease_end()
        assert first is not None and 0 < first - wrong() <= 15.5, "by the clock of the gateway that asks"
        seen = await other_answers.get("acme", made.response_id, 2.0)
        assert seen is not None
        ended = replace(seen, status="cancelled")
        assert ended.open(wrong()) and not ended.open(wrong() + 16)

        later = 21.0  # the leases are over, and the wrong clock's gateway takes them ...
        assert await other_lines.claim(batch.batch_id, "validating", wrong() + later, wrong() + 20)
        taken = await other_lines.claim_lines(batch.batch_id, wrong() + later, wrong() + 20, 9)
        assert [one.takeovers for one in taken] == [1]
        assert await other_answers.claim(made, wrong() + later, wrong() + 15)
        # ... and keeps them from one whose clock is right
        await other_lines.extend_leases(wrong() + 20, [])
        assert await lines.claim_lines(batch.batch_id, right(), right() + 20, 9) == []
        assert not await answers.claim(made, right(), right() + 15)
        assert await other_answers.keep_alive(made, wrong() + 15)
        assert not await answers.abandoned(right(), 9)
        assert [one.response_id for one in await answers.abandoned(right() + 16, 9)] == [made.response_id]
    finally:
        await answers.delete("acme", made.response_id)
        for store in (lines, other_lines, answers, other_answers):
            await store.close()


async def test_a_page_of_rows_is_short_unless_more_are_asked_for() -> None:
    limits: list[int] = []

    async def read(query: Select[Any]) -> list[dict[str, Any]]:
        limits.append(query.compile().params["param_1"])
        return []

    usage = UsageAdmin(read, lambda: MIDNIGHT)
    assert await usage.rows(RowsQuery()) == {"rows": [], "next": None}
    await usage.rows(RowsQuery(limit=10_000))
    assert limits == [1_000, 10_000]
