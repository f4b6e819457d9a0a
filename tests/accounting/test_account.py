"""Accounts: each is settled exactly once, however its block ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from accounting.account import Accounts
from accounting.errors import AlreadySettled
from accounting.values import PartialUsage, UsageRow

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


def used(tokens: int, *, delivered: bool = True) -> Callable[[BaseException], PartialUsage]:
    return lambda error: PartialUsage(replace(ROW, output_tokens=tokens), delivered)


def test_a_settled_account_bills_the_row_it_was_settled_with_and_nothing_else() -> None:
    outbox = ListOutbox()
    with Accounts(outbox).open(ROW, used(3)) as account:
        account.settle(replace(ROW, output_tokens=5, finish_reason="stop"))
    assert outbox.rows == [replace(ROW, output_tokens=5, finish_reason="stop")]


def test_an_exception_bills_what_was_delivered_so_far_as_an_error() -> None:
    outbox = ListOutbox()
    with pytest.raises(KeyError), Accounts(outbox).open(ROW, used(3)):
        raise KeyError
    assert outbox.rows == [
        replace(ROW, output_tokens=3, billable_output_tokens=3, finish_reason="error"),
    ]


def test_an_answer_that_broke_off_before_anything_was_delivered_is_not_billable() -> None:
    outbox = ListOutbox()
    with pytest.raises(KeyError), Accounts(outbox).open(ROW, used(3, delivered=False)):
        raise KeyError
    assert outbox.rows == [replace(ROW, output_tokens=3, finish_reason="error")]


def test_a_forgotten_settlement_is_billed_as_an_error() -> None:
    outbox = ListOutbox()
    with Accounts(outbox).open(ROW, used(3)):
        pass
    assert outbox.rows == [replace(ROW, finish_reason="error")]


def test_a_failure_after_settling_bills_nothing_more() -> None:
    outbox = ListOutbox()
    with pytest.raises(KeyError), Accounts(outbox).open(ROW, used(3)) as account:
        account.settle(ROW)
        raise KeyError
    assert outbox.rows == [ROW]


@pytest.mark.asyncio
async def test_a_cancellation_bills_what_was_delivered_so_far_as_cancelled() -> None:
    outbox, begun, errors = ListOutbox(), asyncio.Event(), list[BaseException]()
    accounts = Accounts(outbox)

    def so_far(error: BaseException) -> PartialUsage:
        errors.append(error)
        return PartialUsage(replace(ROW, output_tokens=2), False)

    async def work() -> None:
        with accounts.open(ROW, so_far):
            begun.set()
            await asyncio.sleep(3600)

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(work())
        await begun.wait()
        task.cancel()
    assert outbox.rows == [replace(ROW, output_tokens=2, finish_reason="cancelled")]
    assert [type(error) for error in errors] == [asyncio.CancelledError]


def test_settling_twice_is_a_defect_and_bills_once() -> None:
    outbox = ListOutbox()
    with Accounts(outbox).open(ROW) as account:
        account.settle(ROW)
        with pytest.raises(AlreadySettled, match="gen_1"):
            account.settle(ROW)
    assert outbox.rows == [ROW]


def test_the_priced_row_is_reported_once_however_the_account_ends() -> None:
    bills = list[UsageRow]()
    accounts = Accounts(ListOutbox(), lambda row: replace(row, cost_nanousd=7))
    with accounts.open(ROW, on_settled=bills.append) as account:
        account.settle(ROW)
    with pytest.raises(KeyError), accounts.open(ROW, used(1), bills.append):
        raise KeyError
    assert [(bill.output_tokens, bill.cost_nanousd) for bill in bills] == [(0, 7), (1, 7)]


def test_an_account_takes_only_rows_of_its_own_generation() -> None:
    with (
        Accounts(ListOutbox()).open(ROW) as account,
        pytest.raises(ValueError, match=r"generation_id is 'gen_2'; allowed: 'gen_1'"),
    ):
        account.settle(replace(ROW, generation_id="gen_2"))


class Broken(Exception):
    """A failure in the account's block."""


@given(
    steps=st.lists(st.sampled_from(["settle", "fail", "cancel"]), max_size=6),
)
def test_every_way_through_an_account_bills_exactly_once(steps: list[str]) -> None:
    outbox = ListOutbox()
    accounts = Accounts(outbox)

    def work() -> None:
        with accounts.open(ROW, used(1)) as account:
            for number, step in enumerate(steps):
                if step == "fail":
                    raise Broken
                if step == "cancel":
                    raise asyncio.CancelledError
                account.settle(replace(ROW, output_tokens=number))

    try:
        work()
    except (Broken, asyncio.CancelledError, AlreadySettled):
        assert steps
    assert len(outbox.rows) == 1
