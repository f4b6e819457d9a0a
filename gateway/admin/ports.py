"""What operators ask of the gateway, as the HTTP layer sees it; the desks implement it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from accounting.reports import Page, Span, UsageReport
from gateway.config.chaos import FaultRule
from gateway.contracts.values import CallerRole, GenerateRequest
from gateway.routing.canary import MIN_SAMPLES, STEP_S, STEPS, WINDOW_S


class PromptService(Protocol):
    """The registered prompt versions, and what would be sent for a request."""

    def versions(self) -> Sequence[Mapping[str, object]]:
        """One entry a version, sorted by id."""

    def version(self, version_id: str) -> Mapping[str, object]:
        """All of one version. Raises UnknownPromptVersion."""

    async def preview(self, request: GenerateRequest) -> Mapping[str, object]:
        """What would be sent, section by section; generates nothing and bills nothing.

        Raises the errors that the request itself would meet up to its budget.
        """


class AdmissionService(Protocol):
    """Admission for operators' eyes."""

    def show(self) -> Mapping[str, object]:
        """Queues, limits, forecasts and the last decisions, as JSON values."""


@dataclass(frozen=True, slots=True)
class Promotion:
    """How an adapter's version is promoted.

    Args:
        alias: the name that leads to it; ``None``: it is served under its own.
        percent: of the alias' sessions; below 100 it is a canary.
        force: without a passing evaluation.
        comment: why, for the audit.
        dry_run: nothing is changed; the answer is as it would be.
    """

    alias: str | None = None
    percent: float = 100.0
    force: bool = False
    comment: str = ""
    dry_run: bool = False


class AdapterService(Protocol):
    """The adapters' registry for operators; ``who`` is the key's id.

    Changes are in force in this process when a call returns, in every other within a second. They raise
    what ``gateway.errors`` knows: NoSuchAdapter, AdapterRejected, AdapterNotHere, CatalogueError,
    NotEvaluatedError, BackendUnavailable (the state store is away) and BackendFailure (the engine).
    """

    def show_all(self) -> Mapping[str, object]:
        """Every version and alias, and what is loaded here."""

    def show(self, adapter_id: str) -> Mapping[str, object]:
        """One version or alias."""

    async def add(
        self,
        adapter_id: str,
        location: str,
        *,
        who: str,
        sha256: str | None = None,
        labels: Mapping[str, str] | None = None,
        base_revision: str | None = None,
        comment: str = "",
        dry_run: bool = False,
    ) -> Mapping[str, object]:
        """Bring, check and register a version, staged; of a dry run only check."""

    async def verify(self, adapter_id: str, *, who: str) -> Mapping[str, object]:
        """Check a version's copy on this machine anew."""

    async def preload(self, adapter_id: str, *, who: str) -> Mapping[str, object]:
        """Load a version now, in every process."""

    async def promote(self, adapter_id: str, promotion: Promotion, *, who: str) -> Mapping[str, object]:
        """Lead an alias to a version, or make it active."""

    async def retire(
        self, adapter_id: str, *, who: str, comment: str = "", dry_run: bool = False
    ) -> Mapping[str, object]:
        """Serve a version no more."""

    async def pin(self, adapter_id: str, pinned: bool, *, who: str) -> Mapping[str, object]:
        """Keep a version loaded in every process, or no longer."""

    async def label(self, adapter_id: str, labels: Mapping[str, str], *, who: str) -> Mapping[str, object]:
        """Give a version other labels."""

    async def evaluated(
        self, adapter_id: str, report: Mapping[str, object], *, who: str
    ) -> Mapping[str, object]:
        """Keep an evaluation's report with a version."""

    async def roll_back(
        self, alias: str, *, who: str, to: str | None = None, comment: str = "", dry_run: bool = False
    ) -> Mapping[str, object]:
        """Lead an alias back."""

    async def end_canary(
        self, alias: str, *, who: str, comment: str = "", dry_run: bool = False
    ) -> Mapping[str, object]:
        """Take an alias' canary away."""


@dataclass(frozen=True, slots=True)
class RoutingOrder:
    """Who changes the routing, and how.

    Args:
        who: the key's id.
        comment: why, for history and audit.
        expected: the revision that the operator has seen last; ``None``: whatever it is.
        dry_run: validate and show what would change; change nothing.
    """

    who: str
    comment: str = ""
    expected: int | None = None
    dry_run: bool = False


class RoutingService(Protocol):
    """The routing's revisions for operators.

    A change is in force in this process when its call returns, in every other within a second. Changes raise
    InvalidRequest (every fault with its path), UnknownRoute, RevisionConflict (another one came first) and
    BackendUnavailable (the state store is away); reads raise the last too.
    """

    def show(self) -> Mapping[str, object]:
        """The revision in force in this process, and whether the store has one that it cannot use."""

    async def apply(self, config: Mapping[str, object], order: RoutingOrder) -> Mapping[str, object]:
        """Make a whole configuration the next revision."""

    async def set_weight(
        self, route: str, backend: str, percent: float, order: RoutingOrder
    ) -> Mapping[str, object]:
        """Give a backend its share of a route; the others share the rest in proportion."""

    async def promote(self, route: str, backend: str, order: RoutingOrder) -> Mapping[str, object]:
        """Give a backend the whole route."""

    async def roll_back(self, to: int | None, order: RoutingOrder) -> Mapping[str, object]:
        """Make an earlier configuration the next revision; ``None``: the last other one."""

    async def history(self, limit: int) -> Sequence[Mapping[str, object]]:
        """The last revisions, newest first."""

    async def diff(self, a: int, b: int) -> Sequence[Mapping[str, object]]:
        """What differs from revision ``a`` to ``b``."""

    async def audit(self, limit: int) -> Sequence[Mapping[str, object]]:
        """What operators did last, newest first."""


@dataclass(frozen=True, slots=True)
class CanaryOrder:
    """What a canary shall be; ``gateway.routing.canary.CanaryPlan`` tells of the fields."""

    who: str
    route: str
    backend: str
    comment: str = ""
    steps: tuple[float, ...] = STEPS
    min_samples: int = MIN_SAMPLES
    step_s: float = STEP_S
    window_s: float = WINDOW_S
    dry_run: bool = False


class CanaryService(Protocol):
    """The canary for operators; there is one at a time.

    Orders raise InvalidRequest, UnknownRoute, RevisionConflict (it is not in a phase for that, or somebody
    was quicker) and BackendUnavailable (the state store is away).
    """

    def show(self) -> Mapping[str, object]:
        """The last canary, as this process knows it."""

    async def start(self, order: CanaryOrder) -> Mapping[str, object]:
        """Give a backend the first step of a route, and more as it proves itself.

        A dry run validates, tells the changes of the first step, and makes none.
        """

    async def pause(self, who: str, comment: str) -> Mapping[str, object]:
        """Keep its share, judge nothing."""

    async def resume(self, who: str, comment: str) -> Mapping[str, object]:
        """Judge again."""

    async def abort(self, who: str, comment: str, *, dry_run: bool = False) -> Mapping[str, object]:
        """End it, with the route's weights as before. A dry run tells the changes and makes none."""


@dataclass(frozen=True, slots=True)
class KeyOrder:
    """A key to be made; ``None`` is no limit, ``expires_at`` is Unix seconds."""

    tenant: str
    role: CallerRole = CallerRole.CALLER
    max_priority: int = 0
    routes: tuple[str, ...] | None = None
    adapters: tuple[str, ...] | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    expires_at: float | None = None
    comment: str = ""
    org: str | None = None


class KeyService(Protocol):
    """The keys for admins; ``who`` is the key's id.

    Changes are in force in this process when a call returns, in every other within a second. They raise
    InvalidRequest, Forbidden (too many keys), NoSuchKey and BackendUnavailable (the state store is away).
    """

    def show_all(self) -> Mapping[str, object]:
        """The keys that are not revoked; no secret."""

    async def create(self, order: KeyOrder, *, who: str) -> Mapping[str, object]:
        """Make a key; the answer alone tells its secret."""

    async def revoke(self, key_id: str, *, who: str) -> None:
        """Refuse a key from now on."""


class ShadowService(Protocol):
    """How shadowed requests compare, for operators; raises BackendUnavailable when the ledger is away."""

    async def report(
        self, *, limit: int, route: str | None = None, since: float | None = None
    ) -> Mapping[str, object]:
        """The newest ``limit`` pairs, compared, of one route or all, since a Unix time."""


class UsageService(Protocol):
    """The ledger for operators; raises BackendUnavailable when its database cannot be read."""

    async def report(self, report: UsageReport) -> Mapping[str, object]:
        """Sums. Raises InvalidRequest: too many lines."""

    async def rows(self, page: Page) -> Mapping[str, object]:
        """A page of rows."""

    async def reconcile(self, span: Span) -> Mapping[str, object]:
        """The ledger beside the engines' own counters."""


class ChaosService(Protocol):
    """The faults made on purpose, for operators' eyes and hands."""

    def show(self) -> Mapping[str, object]:
        """The rules in force and what they did, as JSON values."""

    async def replace(self, rules: Sequence[FaultRule], *, who: str) -> Mapping[str, object]:
        """Put other rules in force; these. Raises InvalidRequest for a backend that is not there."""


class DrainService(Protocol):
    """Taking this process out of service."""

    async def begin(self, who: str) -> Mapping[str, object]:
        """Begin, unless it has begun. ``in_flight``: how many are inside; ``closed``: nobody new is taken."""
