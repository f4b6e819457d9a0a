"""Evaluations of backends against each other: the last signed report of each candidate, from a stream.

A report is valid while both backends are configured as they were when it was made: it contains the digest of
each configuration, and that of the set of prompts.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import structlog

from gateway.contracts.evaluation_report import is_signed
from gateway.errors import InvalidRequest
from gateway.state.port import Record
from gateway.state.projection import FollowedStream

STREAM = "evaluations"


class BackendEvaluations(FollowedStream):
    """Applies the stream's records, and appends reports.

    Args:
        digests: of each backend's configuration, by name.
        key: signs the reports.
    """

    def __init__(self, *, digests: Mapping[str, str], key: bytes) -> None:
        self._key = key
        self.digests = digests
        self.reports: dict[str, Mapping[str, Any]] = {}

    def take(self, record: Record) -> None:
        """Apply a record; log and skip one that cannot be decoded."""
        try:
            report = json.loads(record.data)
            self.reports[report["candidate"]] = {**report, "author": record.author, "at": record.at}
        except (ValueError, KeyError, TypeError):
            structlog.get_logger("routing").error("an evaluation is not understood", number=record.number)

    async def add(self, report: Mapping[str, Any], *, author: str) -> None:
        """Store a report. Raises InvalidRequest, StateUnavailable."""
        if not is_signed(report, self._key):
            raise _refusal("it is not signed by `sluice evaluate` with the secret of this gateway")
        if not isinstance(report.get("passed"), bool):
            raise _refusal("it does not say whether it passed")
        for side in ("base", "candidate"):
            name = report.get(side)
            digest = self.digests.get(name) if isinstance(name, str) else None
            if digest is None or digest != report.get(f"{side}_digest"):
                raise _refusal(f"its {side} {name!r} is not a backend, or is configured differently now")
        record = await self.followed.append(json.dumps(report).encode(), author=author)
        await self.caught_up_to(record.number)

    def fault(self, backend: str) -> str | None:
        """Return why the backend has no valid, passed evaluation; ``None`` if it has one."""
        report = self.reports.get(backend)
        if report is None:
            return f"the evaluation of backend {backend!r} has not been run"
        for side in ("base", "candidate"):
            if self.digests.get(str(report[side])) != report.get(f"{side}_digest"):
                return f"backend {report[side]!r} is configured differently than when it was evaluated"
        return None if report["passed"] else f"the evaluation of backend {backend!r} did not pass"


def _refusal(reason: str) -> InvalidRequest:
    return InvalidRequest(f"report: {reason}", param="report")


def digest_of(*sections: Mapping[str, Any]) -> str:
    """Return the SHA-256 of those settings that determine which model answers."""
    return hashlib.sha256(json.dumps(sections, sort_keys=True).encode()).hexdigest()
