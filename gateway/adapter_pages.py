"""What the admin API tells of a version, an alias, and a check."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from adapters.catalogue import Alias, Catalogue, Version
from adapters.verify import Verified


def alias_page(alias: Alias) -> Mapping[str, object]:
    """An alias and where it led before."""
    return {
        "alias": alias.name,
        "target": alias.target,
        "canary": alias.canary,
        "percent": alias.percent if alias.canary else None,
        "history": list(alias.history),
    }


def version_page(
    version: Version, catalogue: Catalogue, *, resident: bool, leases: int, heat: float
) -> Mapping[str, object]:
    """A version, and how it stands in this process."""
    return {
        "id": version.adapter_id,
        "state": version.state.value,
        "aliases": list(catalogue.named_by(version.adapter_id)),
        "engine_id": version.engine_id,
        "base_model": version.base_model,
        "base_revision": version.base_revision,
        "rank": version.rank,
        "alpha": version.alpha,
        "target_modules": list(version.target_modules),
        "size_bytes": version.size_bytes,
        "sha256": version.sha256,
        "location": version.location,
        "labels": dict(version.labels),
        "pinned": version.pinned,
        "resident": resident,
        "leases": leases,
        "heat": round(heat, 3),
        "evaluation": dict(version.report) or None,
        "author": version.author,
        "at": datetime.fromtimestamp(version.at, UTC).isoformat(timespec="seconds"),
    }


def verified_page(adapter_id: str, verified: Verified) -> Mapping[str, object]:
    """What a check has found."""
    return {
        "id": adapter_id,
        "verified": True,
        "rank": verified.rank,
        "alpha": verified.alpha,
        "target_modules": list(verified.target_modules),
        "size_bytes": verified.size_bytes,
        "sha256": verified.sha256,
        "base_name": verified.base_name,
        "shapes_checked": verified.shapes_checked,
    }
