"""One account per generation: opened before the work, settled exactly once whatever happens."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, suppress
from typing import Protocol, Self

from msgspec import Struct
from msgspec.structs import replace

from accounting.errors import AlreadySettled, NotRecorded
from accounting.values import PartialUsage, UsageRow

CANCELLED = "cancelled"
ERROR = "error"


class Outbox(Protocol):
    """Where settled rows go. ``append`` neither blocks nor raises. It returns ``False`` when the row is lost;
    the ledger reports the loss.
    """

    @property
    def accepts(self) -> bool:
        """Whether new work may start; false only when no row may be lost and one might be."""

    def append(self, row: UsageRow) -> bool:
        """Accept a row to be written later."""

    def durable(self) -> Awaitable[bool]:
        """Wait until all appended rows are durable; ``False`` means that no answer may be sent."""


class HeldRows:
    """An outbox that holds rows until the caller takes them, to store them with the work's result."""

    accepts = True

    def __init__(self) -> None:
        self._rows: dict[str, UsageRow] = {}

    def append(self, row: UsageRow) -> bool:
        """Hold the row; always true."""
        self._rows[row.generation_id] = row
        return True

    async def durable(self) -> bool:
        """Always true: the code that takes a row stores it with the work's result."""
        return True

    def take(self, generation_id: str) -> UsageRow | None:
        """Remove and return the row of a generation; ``None`` if it was not settled."""
        return self._rows.pop(generation_id, None)


class Account(Struct, eq=False):
    """The bill of one generation; made and entered through :meth:`Accounts.open`."""

    _accounts: "Accounts"
    _row: UsageRow
    _so_far: Callable[[BaseException], PartialUsage] | None
    _on_settled: Callable[[UsageRow], None]
    _usable: bool = False

    def settle(self, row: UsageRow) -> None:
        """Bill the exact figures, once. There is no await, so a cancellation cannot interrupt it. Raises
        AlreadySettled, or ValueError for a row of another generation.
        """
        if not self._usable:
            raise AlreadySettled(self._row.generation_id)
        if row.generation_id != self._row.generation_id:
            raise ValueError(
                f"generation_id is {row.generation_id!r}; allowed: {self._row.generation_id!r}, the account's"
            )
        self._usable = False
        row = self._accounts.price(row)
        self._accounts.outbox.append(row)
        self._on_settled(row)

    def __enter__(self) -> Self:
        self._usable = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self._usable:
            return
        row = self._row
        if error is not None and self._so_far is not None:
            used = self._so_far(error)
            # A tenant pays for a partial answer only if a part of it was delivered.
            row = used.row.delivered() if used.delivered else used.row
        cancelled = error is not None and not isinstance(error, Exception)
        self.settle(replace(row, finish_reason=CANCELLED if cancelled else ERROR))


class Accounts:
    """Opens accounts whose rows go to ``outbox``. ``price`` adds the cost to a row and must not raise."""

    def __init__(self, outbox: Outbox, price: Callable[[UsageRow], UsageRow] = lambda row: row) -> None:
        self.outbox = outbox
        self.price = price

    def open(
        self,
        row: UsageRow,
        so_far: Callable[[BaseException], PartialUsage] | None = None,
        on_settled: Callable[[UsageRow], None] = lambda row: None,
    ) -> AbstractContextManager[Account]:
        """``with open(row) as account``: leaving the block settles the account, if the block did not.

        Leaving bills the usage that ``so_far`` returns for the exception (without ``so_far``, ``row``), with
        the ``finish_reason`` ``cancelled`` for a cancellation and ``error`` for everything else.
        ``on_settled`` gets the priced row in either case. Neither function may raise.

        Raises NotRecorded when no row may be lost and this one might be.
        """
        if not self.outbox.accepts:
            raise NotRecorded("usage cannot be recorded now; the work was not begun")
        return Account(self, row, so_far, on_settled)

    async def durable(self) -> None:
        """Wait until settled rows are durable. Raises NotRecorded when no answer may be sent."""
        if not await self.outbox.durable():
            raise NotRecorded("usage cannot be recorded now; the answer was not given")

    async def durable_if_possible(self) -> None:
        """Like ``durable``, but before an error, which is sent in any case; the ledger reports lost rows."""
        with suppress(NotRecorded):
            await self.durable()
