"""Accounts: settled exactly once, whatever way the work is left."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from accounting.account import Accounts
from accounting.errors import AlreadySettled
from accounting.values import UsageRow

ROW = UsageRow(
    generation_id="gen_1",
    request_id="req_1",
    tenant="acme",
    key_id="k1",
    contract="native",
    route="main",
    started_at=1.0,
)


class ListOutbox:
    """An outbox that keeps rows in a list."""

    def __init__(self) -> None:
        self.rows: list[UsageRow] = []

    accepts = True

    def append(self, row: UsageRow) -> bool:
        self.rows.append(row)
        return True

    async def durable(self) -> bool:
        return True


def test_a_settled_account_bills_the_row_it_was_settled_with_and_nothing_else() -> None:
    outbox = ListOutbox()
    with Accounts(outbox).open(ROW) as account:
        account.update(replace(ROW, output_tokens=3))
        account.settle(replace(ROW, output_tokens=5, finish_reason="stop"))
    assert outbox.rows == [replace(ROW, output_tokens=5, finish_reason="stop")]


def test_an_exception_bills_what_was_known_as_an_error() -> None:
    outbox = ListOutbox()
    with pytest.raises(KeyError), Accounts(outbox).open(ROW) as account:
        account.update(replace(ROW, output_tokens=3, finish_reason="stop"))
        raise KeyError
    assert outbox.rows == [replace(ROW, output_tokens=3, finish_reason="error")]


def test_a_forgotten_settlement_is_billed_as_an_error() -> None:
    outbox = ListOutbox()
    with Accounts(outbox).open(ROW):
        pass
    assert outbox.rows == [replace(ROW, finish_reason="error")]


def test_a_failure_after_settling_bills_nothing_more() -> None:
    outbox = ListOutbox()
    with pytest.raises(KeyError), Accounts(outbox).open(ROW) as account:
        account.settle(ROW)
        raise KeyError
    assert outbox.rows == [ROW]


@pytest.mark.asyncio
async def test_a_cancellation_bills_what_was_known_as_cancelled() -> None:
    outbox, begun = ListOutbox(), asyncio.Event()
    accounts = Accounts(outbox)

    async def work() -> None:
        with accounts.open(ROW) as account:
            account.update(replace(ROW, output_tokens=2))
            begun.set()
            await asyncio.sleep(3600)

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(work())
        await begun.wait()
        assert accounts.open_now == 1
        task.cancel()
    assert outbox.rows == [replace(ROW, output_tokens=2, finish_reason="cancelled")]
    assert accounts.open_now == 0


def test_settling_twice_or_updating_afterwards_is_a_defect_and_bills_once() -> None:
    outbox = ListOutbox()
    with Accounts(outbox).open(ROW) as account:
        account.settle(ROW)
        with pytest.raises(AlreadySettled, match="gen_1"):
            account.settle(ROW)
        with pytest.raises(AlreadySettled):
            account.update(ROW)
    assert outbox.rows == [ROW]


def test_an_account_takes_only_rows_of_its_own_generation() -> None:
    with (
        Accounts(ListOutbox()).open(ROW) as account,
        pytest.raises(ValueError, match=r"generation_id is 'gen_2'; allowed: 'gen_1'"),
    ):
        account.settle(replace(ROW, generation_id="gen_2"))


def test_an_opening_is_entered_once() -> None:
    opening = Accounts(ListOutbox()).open(ROW)
    with opening, pytest.raises(RuntimeError):
        opening.__enter__()


class Broken(Exception):
    """What goes wrong in the work."""


@given(
    steps=st.lists(st.sampled_from(["update", "settle", "fail", "cancel"]), max_size=6),
)
def test_every_way_through_an_account_bills_exactly_once(steps: list[str]) -> None:
    outbox = ListOutbox()
    accounts = Accounts(outbox)

    def work() -> None:
        with accounts.open(ROW) as account:
            for number, step in enumerate(steps):
                if step == "fail":
                    raise Broken
                if step == "cancel":
                    raise asyncio.CancelledError
                row = replace(ROW, output_tokens=number)
                if step == "update":
                    account.update(row)
                else:
                    account.settle(row)

    try:
        work()
    except (Broken, asyncio.CancelledError, AlreadySettled):
        assert steps
    assert len(outbox.rows) == 1
    assert accounts.open_now == 0
