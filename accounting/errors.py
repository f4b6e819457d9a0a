"""The closed tree of accounting's errors."""


class AccountingError(Exception):
    """Usage cannot be recorded or read."""


class LedgerUnavailable(AccountingError):
    """The ledger's url cannot be used, or its rows cannot be read now; the message says which."""


class NotRecorded(AccountingError):
    """Usage cannot be made durable now, and ``ledger.durability: strict`` sends no answer without that."""


class PriceError(AccountingError):
    """The price book cannot be used; the message has the place, the value and what is allowed."""


class AlreadySettled(AccountingError):
    """An account was settled or updated after it had been settled."""

    def __init__(self, generation_id: str) -> None:
        self.generation_id = generation_id
        super().__init__(f"the account of generation {generation_id!r} is settled already")
