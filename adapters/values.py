"""Values of the adapter registry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Adapter:
    """One registered LoRA adapter version.

    Args:
        adapter_id: its name, unique, e.g. ``manga_domain_v3``.
        engine_id: the integer an engine knows it by; positive, never reused.
        base_model: the served base model it belongs to.
        path: the folder with ``adapter_config.json`` and its weights.
        labels: free words for selection and reports.
    """

    adapter_id: str
    engine_id: int
    base_model: str
    path: str
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class SelectionRule:
    """A route's rule: every entry of ``when`` must equal the request's field of that name."""

    when: Mapping[str, str]
    adapter_id: str


@dataclass(frozen=True, slots=True)
class Selection:
    """What selection looks at: the explicit wish, then the rules over the request's fields, in order."""

    adapter_id: str | None
    rules: tuple[SelectionRule, ...] = ()
    fields: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
