"""Errors that stop a start: one clear line each, no traceback."""

from __future__ import annotations

from collections.abc import Iterator

from accounting.errors import AccountingError
from adapters.errors import AdapterError
from budgeting.errors import BudgetError
from engine.errors import EngineStartError
from gateway.config.errors import ConfigError
from gateway.prompts.versions import PromptFileError
from gateway.routing.revision import RoutingFileError
from gateway.weights.errors import FetchError

START_ERRORS = (
    AccountingError,
    AdapterError,
    BudgetError,
    ConfigError,
    EngineStartError,
    FetchError,
    PromptFileError,
    RoutingFileError,
)


def start_errors(error: BaseException) -> Iterator[BaseException]:
    """The errors inside ``error`` (which may be a group) that are the operator's to mend."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from start_errors(inner)
    elif isinstance(error, (*START_ERRORS, TimeoutError)):
        yield error
