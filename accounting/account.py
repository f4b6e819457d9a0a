"""One account per generation: opened before the work, settled exactly once whatever happens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Protocol

from msgspec.structs import replace

from accounting.errors import AlreadySettled, NotRecorded
from accounting.values import UsageRow

CANCELLED = "cancelled"
ERROR = "error"


class Outbox(Protocol):
    """Where settled rows go.

    Invariant: ``append`` neither blocks nor raises; ``False`` means that the row is lost, and told so.
    """

    @property
    def accepts(self) -> bool:
        """Whether work may begin whose row comes later; false only where no row may be lost."""

    def append(self, row: UsageRow) -> bool:
        """Take a row to be written."""

    async def durable(self) -> bool:
        """Wait until the rows so far are as durable as they are meant to be before an answer goes out.

        ``False``: they are not, and it may not.
        """


def unpriced(row: UsageRow) -> UsageRow:
    """No price book: nothing costs anything."""
    return row


class Account:
    """What a generation has used so far, and whether that has been settled."""

    __slots__ = ("_outbox", "_price", "_row", "_settled")

    def __init__(
        self, row: UsageRow, outbox: Outbox, price: Callable[[UsageRow], UsageRow] = unpriced
    ) -> None:
        self._row = row
        self._price = price
        self._outbox = outbox
        self._settled = False

    @property
    def row(self) -> UsageRow:
        """The row as last updated or settled."""
        return self._row

    @property
    def settled(self) -> bool:
        """Whether the row has gone to the outbox."""
        return self._settled

    def update(self, row: UsageRow) -> None:
        """Remember what is known by now; it is what counts when the work breaks off.

        Raises AlreadySettled; ValueError for a row of another generation.
        """
        self._check(row)
        self._row = row

    def settle(self, row: UsageRow) -> None:
        """Bill the exact figures, once; without an await, so that nothing can interrupt it.

        Raises AlreadySettled; ValueError for a row of another generation.
        """
        self._check(row)
        self._row = row = self._price(row)
        self._settled = True
        self._outbox.append(row)

    def _check(self, row: UsageRow) -> None:
        if self._settled:
            raise AlreadySettled(self._row.generation_id)
        if row.generation_id != self._row.generation_id:
            raise ValueError(
                f"generation_id is {row.generation_id!r}; allowed: {self._row.generation_id!r}, the account's"
            )


class Accounts:
    """Opens accounts whose rows go to one outbox.

    Args:
        outbox: where settled rows go.
        price: adds what a row costs; must not raise.
    """

    def __init__(self, outbox: Outbox, price: Callable[[UsageRow], UsageRow] = unpriced) -> None:
        self._outbox = outbox
        self._price = price
        self._open = 0

    @property
    def open_now(self) -> int:
        """Accounts that are open and not yet left; 0 when idle."""
        return self._open

    def open(self, row: UsageRow) -> AbstractContextManager[Account]:
        """``with open(row) as account``: leaving settles, if the block did not.

        Then the row as last updated is billed, with ``finish_reason`` ``cancelled`` when a cancellation
        (or the end of the interpreter or of a generator) left the block, else ``error``: no whole answer
        was told of.

        Raises NotRecorded: no row may be lost, and this one might be.
        """
        if not self._outbox.accepts:
            raise NotRecorded("usage cannot be recorded now; the work was not begun")
        return _Opening(self, row)

    async def durable(self) -> None:
        """Wait until what is settled is as durable as it is meant to be before an answer goes out.

        Raises NotRecorded: it is not, and none may.
        """
        if not await self._outbox.durable():
            raise NotRecorded("usage cannot be recorded now; the answer was not given")

    async def durable_if_it_can_be(self) -> None:
        """The same, where an answer goes out all the same: what cannot be recorded is told by the ledger."""
        with suppress(NotRecorded):
            await self.durable()


class _Opening(AbstractContextManager[Account]):
    """One account's block. Entered once."""

    __slots__ = ("_accounts", "_entered", "_held", "_row")

    def __init__(self, accounts: Accounts, row: UsageRow) -> None:
        self._accounts = accounts
        self._row = row
        self._entered = False
        self._held: Account | None = None

    def __enter__(self) -> Account:
        if self._entered:
            raise RuntimeError("an account is entered once; ask open() for another")
        self._entered = True
        self._held = Account(self._row, self._accounts._outbox, self._accounts._price)
        self._accounts._open += 1
        return self._held

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        held, self._held = self._held, None
        if held is None:
            return
        self._accounts._open -= 1
        if not held.settled:
            broken_off = error is not None and not isinstance(error, Exception)
            held.settle(replace(held.row, finish_reason=CANCELLED if broken_off else ERROR))
