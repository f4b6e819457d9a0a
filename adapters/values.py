"""Values of the adapter registry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

_NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Adapter:
    """One registered LoRA adapter version.

    Args:
        adapter_id: its name, unique, e.g. ``manga_domain_v3``.
        engine_id: its integer id in engines; positive, never reused.
        base_model: the served base model it belongs to.
        path: the folder with ``adapter_config.json`` and its weights.
        labels: free text for selection and reports.
    """

    adapter_id: str
    engine_id: int
    base_model: str
    path: str
    labels: Mapping[str, str] = field(default_factory=lambda: _NONE)


@dataclass(frozen=True, slots=True)
class SelectionRule:
    """A route's rule: every entry of ``when`` must equal the request's field of that name.

    It selects ``adapter_id``, or if that is ``None`` the newest active version with all ``labels``.
    """

    when: Mapping[str, str]
    adapter_id: str | None
    labels: Mapping[str, str] = field(default_factory=lambda: _NONE)


@dataclass(frozen=True, slots=True)
class Selection:
    """The input of a selection: the explicit wish, then the rules over the request's fields, in order.

    Args:
        adapter_id: what the caller named: a version or an alias.
        rules: the route's.
        fields: the request's, for the rules.
        sticky_key: the session, else the request, so that a caller stays on one version of an alias.
        allowed: the versions and aliases that the key may use; ``None``: all.
        operator: may name versions that are staged.
        or_base: the base model answers when a rule names an adapter that is not served.
    """

    adapter_id: str | None
    rules: tuple[SelectionRule, ...] = ()
    fields: Mapping[str, str] = field(default_factory=lambda: _NONE)
    sticky_key: str = ""
    allowed: tuple[str, ...] | None = None
    operator: bool = False
    or_base: bool = False
