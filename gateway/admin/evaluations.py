"""Evaluations of backends for operators: show them, and store signed ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import TypedDict

from gateway.contracts.fields import Body
from gateway.routing.evaluations import BackendEvaluations
from gateway.routing.refusals import operator_errors
from gateway.state.audit import Audit


class EvaluationBody(Body):
    """A report that `sluice evaluate variant` signed."""

    report: dict[str, Any]


class EvaluationsBody(TypedDict):
    """The digest of each backend's configuration, and the last report of each candidate.

    ``faults`` has, by backend, the reason why it has no valid evaluation.
    """

    backends: Mapping[str, str]
    evaluations: list[Mapping[str, Any]]
    faults: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class EvaluationAdmin:
    """Shows and stores evaluations; ``who`` is the key's id."""

    evaluations: BackendEvaluations
    audit: Audit

    def show(self) -> EvaluationsBody:
        faults = {name: self.evaluations.fault(name) for name in self.evaluations.digests}
        return {
            "backends": self.evaluations.digests,
            "evaluations": list(self.evaluations.reports.values()),
            "faults": {name: fault for name, fault in faults.items() if fault is not None},
        }

    async def add(self, given: EvaluationBody, *, who: str) -> EvaluationsBody:
        """Store a report. Raises InvalidRequest, BackendUnavailable."""
        target = f"{given.report.get('candidate')} against {given.report.get('base')}"
        async with self.audit.attempt(who, "backend.evaluated", target):
            with operator_errors():
                await self.evaluations.add(given.report, author=who)
        return self.show()
