"""What the operators' paths answer, for the OpenAPI document; times are ISO 8601 unless a unit is named."""

from __future__ import annotations

from typing import Any, Final, NotRequired

# Pydantic reads TypedDicts of this module alone before Python 3.12.
from typing_extensions import TypedDict


class RoutingChangeAnswer(TypedDict):
    """One difference between two routing configurations."""

    path: str
    before: Any
    after: Any


class RevisionBody(TypedDict):
    """A routing revision."""

    revision: int
    author: str
    created_at: str
    comment: str
    action: str
    parent: int
    config: dict[str, Any]


class BehindBody(TypedDict):
    """The last revision, which this process cannot use, and why."""

    revision: int
    reason: str


class RevisionInForceBody(RevisionBody):
    """The revision in force in this process."""

    in_force_since: str
    behind: BehindBody | None


class RevisionMadeBody(TypedDict):
    """The new revision; of a dry run without a number, author and time."""

    revision: int | None
    parent: int
    comment: str
    config: dict[str, Any]
    changes: list[RoutingChangeAnswer]
    author: NotRequired[str]
    created_at: NotRequired[str]
    action: NotRequired[str]
    dry_run: NotRequired[bool]


class RevisionsBody(TypedDict):
    """Newest first."""

    revisions: list[RevisionBody]


class ChangesBody(TypedDict):
    """What two revisions differ in."""

    changes: list[RoutingChangeAnswer]


class AuditEntry(TypedDict):
    """Something that an operator did, or was refused."""

    number: int
    at: str
    who: str
    action: str
    target: str
    result: str
    comment: str


class AuditBody(TypedDict):
    """Newest first."""

    entries: list[AuditEntry]


class CanaryCheck(TypedDict):
    """One check's figures in this step; ``log10_e`` at ``log10_bound`` rolls back."""

    canary_bad: int
    canary: int
    baseline_bad: int
    baseline: int
    log10_e: float
    log10_bound: float


class CanaryStanding(TypedDict):
    """A canary."""

    id: str
    route: str
    backend: str
    phase: str
    percent: float | None
    step: int
    steps: list[float]
    since: str
    reason: str
    author: str
    comment: str
    min_samples: int
    step_seconds: float
    window_seconds: float
    alpha: float
    tolerance: float
    canary_requests: int
    waiting_for: str | None
    checks: dict[str, CanaryCheck]


class CanaryShownBody(TypedDict):
    """The last canary, and which process drives it."""

    canary: CanaryStanding | None
    driven_by: NotRequired[str]
    dry_run: NotRequired[bool]
    changes: NotRequired[list[RoutingChangeAnswer]]


class KeyShown(TypedDict):
    """A key, without its secret."""

    id: str
    prefix: str
    tenant: str
    org: str | None
    role: str
    max_priority: int
    routes: list[str] | None
    adapters: list[str] | None
    limits: dict[str, int]
    expires_at: str | None
    expired: bool
    comment: str
    created_at: str
    created_by: str
    last_used_at: str | None


class KeyMadeBody(KeyShown):
    """A new key; ``key`` is told this once."""

    key: str


class KeyListed(KeyShown):
    """A key and what its running windows hold."""

    used: dict[str, int]


class KeysBody(TypedDict):
    """Those that are not revoked, oldest first."""

    keys: list[KeyListed]


class AdapterBody(TypedDict):
    """One version of an adapter."""

    id: str
    state: str
    aliases: list[str]
    engine_id: int
    base_model: str
    base_revision: str | None
    rank: int
    alpha: float
    target_modules: list[str]
    size_bytes: int
    sha256: str
    location: str
    labels: dict[str, str]
    pinned: bool
    resident: bool
    leases: int
    heat: float
    evaluation: dict[str, Any] | None
    author: str
    at: str
    dry_run: NotRequired[bool]
    others_told: NotRequired[bool]


class AliasBody(TypedDict):
    """A name that leads to a version, and for some percent of its sessions to a canary."""

    alias: str
    target: str | None
    canary: str | None
    percent: float | None
    history: list[str]
    dry_run: NotRequired[bool]


class AdaptersBody(TypedDict):
    """Versions, aliases, and what this process has loaded."""

    number: int
    adapters: list[AdapterBody]
    aliases: list[AliasBody]
    refused: list[dict[str, str]]
    places: int
    resident: list[str]
    fetching: list[dict[str, Any]]


class VerifiedBody(TypedDict):
    """What the check of a version's copy found."""

    id: str
    verified: bool
    rank: int
    alpha: float
    target_modules: list[str]
    size_bytes: int
    sha256: str
    base_name: str | None
    shapes_checked: bool


class PromptListed(TypedDict):
    """A registered prompt version."""

    id: str
    sha256: str
    published_at: str | None
    routes: list[str]


class PromptsBody(TypedDict):
    """By id."""

    prompts: list[PromptListed]


class PromptBody(PromptListed):
    """All of one version; ``stable_text`` is what is sent first."""

    stable_text: str


class UsageSumsBody(TypedDict):
    """Sums, with the keys of ``by`` in each line."""

    rows: list[dict[str, Any]]


class UsageRowsBody(UsageSumsBody):
    """A page; ``next`` is the next one's ``after``."""

    next: str | None


class FaultsBody(TypedDict):
    """The faults in force in this process, and how often each was made."""

    faults: list[dict[str, Any]]
    injected: list[dict[str, Any]]


class DrainBody(TypedDict):
    """Requests that are still inside, and whether nobody new is taken."""

    draining: bool
    closed: bool
    in_flight: int


class AdmissionBody(TypedDict):
    """Each backend's gate, the limits, and the last decisions, newest first."""

    backends: dict[str, dict[str, Any]]
    limits: dict[str, Any]
    decisions: list[dict[str, Any]]


class PreviewBody(TypedDict):
    """What would be sent, and how its tokens are shared out."""

    route: str
    prompt_version: Any
    max_model_len: int
    input_tokens: int
    generation_reserve: int
    sections: dict[str, dict[str, int]]
    cuts: dict[str, Any]


ANSWERS: Final = (
    RevisionInForceBody,
    RevisionMadeBody,
    RevisionsBody,
    ChangesBody,
    AuditBody,
    CanaryShownBody,
    KeysBody,
    KeyMadeBody,
    AdapterBody,
    AliasBody,
    AdaptersBody,
    VerifiedBody,
    PromptsBody,
    PromptBody,
    UsageSumsBody,
    UsageRowsBody,
    FaultsBody,
    DrainBody,
    AdmissionBody,
    PreviewBody,
)
