"""Every error that a request can meet has an answer, and the table names no error that cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import accounting.errors
import adapters.errors
import admission.errors
import budgeting.errors
import resilience.errors
from gateway.errors import LEAF_ERRORS, GatewayError, Internal, public_error
from resilience.failures import POLICIES, BackendFailure, FailureKind

# Errors of starting and of our own defects: no request meets them.
NOT_FOR_CALLERS = {
    "AccountingError", "AdapterError", "AdmissionError", "BudgetError", "ResilienceError",
    "RegistryFileError", "TokenizerError", "LedgerUnavailable", "AlreadySettled", "PriceError",
    "UnwritableRows",
}  # fmt: skip


def tree(root: type[Exception]) -> Iterator[type[Exception]]:
    yield root
    for child in root.__subclasses__():
        yield from tree(child)


def test_every_leaf_error_a_request_can_meet_is_in_the_table() -> None:
    roots = [
        accounting.errors.AccountingError,
        adapters.errors.AdapterError,
        admission.errors.AdmissionError,
        budgeting.errors.BudgetError,
        resilience.errors.ResilienceError,
    ]
    met = {error for root in roots for error in tree(root) if error.__name__ not in NOT_FOR_CALLERS}
    assert met | {BackendFailure} == set(LEAF_ERRORS)


def test_every_gateway_error_has_a_status_and_a_code_of_its_own_but_the_root() -> None:
    documented = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
    for error in tree(GatewayError):
        if error is GatewayError:
            continue
        assert 400 <= error.status < 600
        assert f"`{error.code}`" in documented


def test_every_failure_kind_has_a_policy_and_an_answer_that_is_no_internal_error() -> None:
    for kind in FailureKind:
        assert kind in POLICIES
        public = public_error(BackendFailure(kind, "why"))
        assert public.status in (422, 503, 504) and public.code != Internal.code


def test_an_unknown_exception_tells_nothing() -> None:
    public = public_error(ValueError("secret"))
    assert (public.status, public.code) == (500, "internal")
    assert "secret" not in public.message
