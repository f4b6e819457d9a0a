"""Every error that a request can cause has an answer, and the table names no other errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import accounting.errors
import adapters.errors
import admission.errors
import budgeting.errors
import resilience.errors
from admission.errors import Refused
from admission.values import Reason
from gateway.backends.workers.errors import TimedOut
from gateway.backends.workers.refusal import failure_of_transport
from gateway.errors import LEAF_ERRORS, GatewayError, Internal, public_error
from resilience.failures import POLICIES, BackendFailure, FailureKind

# Base classes, errors of the start, and errors that show a defect of the product: no request causes them.
NOT_FOR_CALLERS = {
    "AccountingError", "AdapterError", "AdmissionError", "BudgetError", "ResilienceError",
    "RegistryFileError", "TokenizerError", "AlreadySettled", "PriceError",
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


def codes_of(status: int) -> set[str]:
    """Return the codes of a status in the documented table."""
    text = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| [\d, ]+ \| `", line)]
    return {code for row in rows if str(status) in row.split("|")[1] for code in re.findall(r"`(\w+)`", row)}


@pytest.mark.parametrize("reason", [one for one in Reason if one is not Reason.TOKEN_BUDGET_EXCEEDED])
def test_every_refusal_of_admission_has_a_code_of_the_table(reason: Reason) -> None:
    public = public_error(Refused(reason, estimated_wait_s=0.1, retry_after_s=2.0))
    assert public.status == 503 and public.code in codes_of(503) and public.retry_after_ms == 2000


@pytest.mark.parametrize("kind", FailureKind)
def test_every_failure_has_a_code_of_the_table(kind: FailureKind) -> None:
    public = public_error(BackendFailure(kind, "why"))
    assert public.code in codes_of(public.status)


def test_an_open_circuit_and_a_hang_blame_the_backend_and_not_a_deadline_or_the_load() -> None:
    circuit = public_error(Refused(Reason.CIRCUIT_OPEN, estimated_wait_s=0.1, retry_after_s=30.0))
    assert circuit.code == "backend_unavailable"
    assert circuit.message == "too many of the backend's last answers failed; it is tried again soon"
    hang = failure_of_transport(TimedOut("nothing more came", 30), delivered=True)
    public = public_error(hang)
    assert (public.status, public.code) == (503, "backend_unavailable")
    assert public.message == "timeout: the worker is too slow: nothing more came within 30 s"


def test_the_answer_to_an_unknown_exception_reveals_nothing() -> None:
    public = public_error(ValueError("secret"))
    assert (public.status, public.code) == (500, "internal")
    assert "secret" not in public.message
