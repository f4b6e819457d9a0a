"""The closed tree of accounting's errors."""


class AccountingError(Exception):
    """Usage cannot be recorded or read."""


class LedgerUnavailable(AccountingError):
    """The ledger's url is not usable, or its database cannot be reached now; the message says which."""


class NotRecorded(AccountingError):
    """Usage cannot be made durable now; ``ledger.durability: strict`` sends no answer without that."""


class PriceError(AccountingError):
    """The price book is invalid; the message names the place, the value and the allowed values."""


class AlreadySettled(AccountingError):
    """An account was settled a second time."""

    def __init__(self, generation_id: str) -> None:
        super().__init__(f"the account of generation {generation_id!r} is settled already")
