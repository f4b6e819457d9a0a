"""Changes of the registry by operators: each function checks the rules and returns the event to append."""

import json
import re
from collections.abc import Mapping
from typing import Any

from adapters.catalogue import AdapterState, Catalogue, CatalogueError, apply
from adapters.verify import Verified

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_NAME_ALLOWED = "1 to 128 of A-Z a-z 0-9 . _ -, a letter or digit first"
MAX_LABELS = 32
MAX_LABEL = 256


class NotEvaluatedError(CatalogueError):
    """A version without a passing evaluation report can be promoted only with ``force``."""


def register(
    catalogue: Catalogue,
    adapter_id: str,
    verified: Verified,
    *,
    base_model: str,
    location: str,
    base_revision: str | None = None,
    labels: Mapping[str, str] | None = None,
) -> bytes | None:
    """Register a new version; ``None`` when the name already has the same content.

    Raises CatalogueError when the name is not allowed, is an alias or retired, or has other content.
    """
    check_new(catalogue, adapter_id, labels or {})
    held = catalogue.versions.get(adapter_id)
    if held is not None:
        if held.sha256 == verified.sha256:
            return None
        raise CatalogueError(
            f"id: {adapter_id!r} is registered with other content; versions never change, so register this "
            "one under another name"
        )
    adapter = {
        "id": adapter_id,
        "base_model": base_model,
        "base_revision": base_revision,
        "rank": verified.rank,
        "alpha": verified.alpha,
        "target_modules": list(verified.target_modules),
        "size_bytes": verified.size_bytes,
        "sha256": verified.sha256,
        "location": location,
        "labels": dict(labels or {}),
    }
    return _event("registered", adapter=adapter)


def check_new(catalogue: Catalogue, adapter_id: str, labels: Mapping[str, str]) -> None:
    """Refuse an invalid name or labels before anything is fetched. Raises CatalogueError."""
    _check_name("id", adapter_id)
    if len(labels) > MAX_LABELS:
        raise CatalogueError(f"labels: given {len(labels)}; allowed: at most {MAX_LABELS}")
    for key, value in labels.items():
        if not 1 <= len(key) <= MAX_LABEL or len(value) > MAX_LABEL:
            raise CatalogueError(f"labels: {key[:40]!r} is too long; allowed: {MAX_LABEL} characters each")
    held = catalogue.versions.get(adapter_id)
    if adapter_id in catalogue.aliases or (held is not None and held.state is AdapterState.RETIRED):
        what = "retired" if held is not None else "an alias"
        raise CatalogueError(f"id: {adapter_id!r} is {what}; choose another name")


def promote(
    catalogue: Catalogue,
    adapter_id: str,
    *,
    alias: str | None,
    percent: float = 100.0,
    force: bool = False,
    comment: str = "",
) -> bytes | None:
    """Point an alias to a version: for all sessions, or as a canary for ``percent`` of them.

    Without an alias the version is served under its own name. ``None`` when nothing would change. Raises
    NotEvaluatedError without a passing report and without ``force``, for any share, else CatalogueError.
    """
    if alias is not None:
        _check_name("alias", alias)
    version = catalogue.version(adapter_id)
    if not version.passed and not force:
        why = "has not been run"
        if version.report:
            signed = version.report.get("signed") is True
            why = "did not pass" if signed else "is not signed by `sluice evaluate` for this content"
        raise NotEvaluatedError(
            f"the evaluation of {adapter_id!r} {why}; run `sluice evaluate adapter`, or force it as an admin"
        )
    led = catalogue.aliases.get(alias) if alias is not None else None
    if percent < 100 and alias is not None and (led is None or led.target is None):
        raise CatalogueError(
            f"percent: given {percent:g}, and alias {alias!r} leads nowhere yet, so that the other sessions "
            "would get nothing; allowed: 100, then a canary beside it"
        )
    forced = force and not version.passed
    event = _event("promoted", id=adapter_id, alias=alias, percent=percent, forced=forced, comment=comment)
    after = _after(catalogue, event)
    unchanged = after.versions == catalogue.versions and after.aliases == catalogue.aliases
    return None if unchanged else event


def roll_back(catalogue: Catalogue, alias: str, *, to: str | None = None, comment: str = "") -> bytes:
    """Point an alias to an earlier version again, by default the last one that is not retired. Raises
    CatalogueError."""
    found = catalogue.aliases.get(alias)
    if found is None:
        raise CatalogueError(
            f"alias: there is no {alias!r}; known: {', '.join(sorted(catalogue.aliases)) or 'none'}"
        )
    if to is None:
        usable = [
            one
            for one in found.history
            if one != found.target and catalogue.version(one).state is not AdapterState.RETIRED
        ]
        if not usable:
            hint = "" if found.canary is None else "; to end its canary, end-canary"
            raise CatalogueError(f"alias: {alias!r} has no earlier version that is not retired{hint}")
        to = usable[-1]
    elif catalogue.version(to).adapter_id not in (found.target, *found.history):
        # A rollback returns to an earlier target; any other version needs a promotion, with its evaluation.
        before = ", ".join(dict.fromkeys(reversed(found.history))) or "none"
        raise CatalogueError(
            f"to: {alias!r} never led to {to!r}; allowed: {before}; to lead it elsewhere, promote"
        )
    return _checked(catalogue, _event("rolled_back", alias=alias, to=to, comment=comment))


def end_canary(catalogue: Catalogue, alias: str, *, comment: str = "") -> bytes:
    """End an alias' canary. Raises CatalogueError when it has none."""
    return _checked(catalogue, _event("canary_ended", alias=alias, comment=comment))


def retire(catalogue: Catalogue, adapter_id: str, *, comment: str = "") -> bytes:
    """Stop serving a version. Raises CatalogueError while an alias points to it."""
    return _checked(catalogue, _event("retired", id=adapter_id, comment=comment))


def evaluate(catalogue: Catalogue, adapter_id: str, report: Mapping[str, Any], *, signed: bool) -> bytes:
    """Store an evaluation with a version; it counts only if ``signed`` and if it names the version's digest.

    Raises CatalogueError when ``report`` lacks ``passed``, or is of other content (``candidate_sha256``).
    """
    held, compared = catalogue.version(adapter_id).sha256, report.get("candidate_sha256", None)
    if compared is not None and compared != held:
        raise CatalogueError(
            f"report.candidate_sha256: given {str(compared)[:64]!r}; allowed: {held!r}, as of {adapter_id}"
        )
    stored = {**report, "signed": signed and compared is not None}
    return _checked(catalogue, _event("evaluated", id=adapter_id, report=stored))


def pin(catalogue: Catalogue, adapter_id: str, pinned: bool) -> bytes:
    return _checked(catalogue, _event("pinned", id=adapter_id, pinned=pinned))


def _event(kind: str, **fields: Any) -> bytes:
    return json.dumps({"event": kind, **fields}, ensure_ascii=False, sort_keys=True).encode()


def _checked(catalogue: Catalogue, event: bytes) -> bytes:
    """The event, if the catalogue allows it. Raises CatalogueError."""
    _after(catalogue, event)
    return event


def _after(catalogue: Catalogue, event: bytes) -> Catalogue:
    return apply(catalogue, event, number=catalogue.number + 1, author="-", at=0.0)


def _check_name(field: str, name: str) -> None:
    if _NAME.fullmatch(name) is None:
        raise CatalogueError(f"{field}: given {name[:140]!r}; allowed: {_NAME_ALLOWED}")
