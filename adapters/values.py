"""Values of the adapter registry."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from msgspec import Struct

_NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Adapter:
    """One registered LoRA adapter version, with its folder (``path``) and its id in engines (``engine_id``, a
    positive integer that is never reused).

    ``at`` names the backends whose workers list an adapter of their own, which has neither folder nor id and
    is never loaded by the gateway; ``None``: a registered adapter.
    """

    adapter_id: str
    engine_id: int
    base_model: str
    path: str
    labels: Mapping[str, str] = field(default_factory=lambda: _NONE)
    at: frozenset[str] | None = None

    def usable_at(self, backend: str) -> bool:
        """Whether it is, or may be loaded, at that backend."""
        return self.at is None or backend in self.at


@dataclass(frozen=True, slots=True)
class SelectionRule:
    """A route's rule: every entry of ``when`` must equal the request's field of that name.

    It selects ``adapter_id``, or if that is ``None`` the newest active version with all ``labels``.
    """

    when: Mapping[str, str]
    adapter_id: str | None
    labels: Mapping[str, str] = field(default_factory=lambda: _NONE)


class Selection(Struct, frozen=True):
    """The input of a selection: the name that the caller gave (``adapter_id``), then the route's rules over
    the request's fields.

    ``sticky_key`` is the session, else the request, so that a caller stays on one version of an alias;
    ``allowed`` are the names that the key may use, ``models`` the base models, which only decide what an
    error lists (``None``: all); an ``operator`` may name staged versions; ``or_base``: the base model answers
    when a rule names an adapter that is not served; ``named_by`` is the request's field with the name.
    """

    adapter_id: str | None
    rules: tuple[SelectionRule, ...] = ()
    fields: Mapping[str, str | None] = _NONE
    sticky_key: str = ""
    allowed: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None
    operator: bool = False
    or_base: bool = False
    named_by: str = "adapter_id"
