"""The adapter of a request: a pure function of the request, the route's rules and the registry."""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from adapters.catalogue import AdapterState, Alias
from adapters.errors import AdapterForbidden, UnknownAdapter
from adapters.values import Adapter, Selection, SelectionRule

EXPLICIT = "explicit"
NONE = "none"

_SERVED = frozenset({AdapterState.ACTIVE, AdapterState.CANARY})


@dataclass(frozen=True, slots=True)
class AdapterOffer:
    """The adapters of a selection: every registered version with its state, the aliases, and the ``refused``
    names in the registry's file, which failed the checks, with the reason."""

    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    states: Mapping[str, AdapterState] = field(default_factory=dict)
    aliases: Mapping[str, Alias] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def served(self) -> tuple[str, ...]:
        """The names that any caller may use, sorted."""
        named = [name for name, state in self.states.items() if state in _SERVED]
        named += [alias.name for alias in self.aliases.values() if alias.target or alias.canary]
        return tuple(sorted(named))

    def usable(self, name: str, adapters: Collection[str] | None, models: Collection[str] | None) -> bool:
        """Whether a key limited to these adapters and base models (``None``: all) may use a served name."""
        if models is not None:
            alias = self.aliases.get(name)
            adapter = self.adapters.get(name if alias is None else alias.target or alias.canary or name)
            if adapter is None or adapter.base_model not in models:
                return False
        return adapters is None or name in adapters


class Lease(Struct, frozen=True):
    """The adapter of a request, ``None`` for the base model, and the ``rule`` that selected it.

    ``rule`` is ``explicit``, ``rule[0]``…, ``none``, or ``canary(25%)`` for a session on an alias' canary;
    ``missing`` the named adapter when the base model is used instead.
    """

    adapter: Adapter | None
    rule: str
    missing: str | None = None

    @property
    def adapter_id(self) -> str | None:
        return None if self.adapter is None else self.adapter.adapter_id


def choose(selection: Selection) -> tuple[str | SelectionRule | None, str]:
    """The adapter's name or the rule that decides (``None``: the base model), and the reason's name.

    In this order: the name that the caller gave (``explicit``); the first of the route's rules whose fields
    all equal the request's (``rule[i]``, counted from 0); else the base model (``none``).
    """
    if selection.adapter_id is not None:
        return selection.adapter_id, EXPLICIT
    for index, rule in enumerate(selection.rules):
        if all(selection.fields.get(name) == wanted for name, wanted in rule.when.items()):
            return (rule if rule.adapter_id is None else rule.adapter_id), f"rule[{index}]"
    return None, NONE


def select(selection: Selection, offer: AdapterOffer) -> Lease:
    """The adapter of a request; instead of one that a rule names, the base model may answer.

    Raises UnknownAdapter when the caller, or the deciding rule, names an adapter that is not served, and
    AdapterForbidden when the caller's key is limited to other adapters.
    """
    wish, rule = choose(selection)
    if wish is None:
        return Lease(None, rule)
    if isinstance(wish, SelectionRule):
        found = _by_labels(wish.labels, offer)
        if found is None:
            return Lease(None, NONE)
        check_allowed(found, (found,), selection)
        return Lease(offer.adapters[found], rule)
    alias, name = offer.aliases.get(wish), wish
    if alias is not None:
        # By session and alias, so that no session is on every canary.
        version = alias.resolve(stable_fraction(alias.name, selection.sticky_key))
        if version is None:
            raise _unknown(wish, offer, selection, "has no version for all sessions yet")
        if version == alias.canary:
            rule = f"canary({alias.percent:g}%)"
        name = version
    try:
        check_allowed(wish, (wish, name), selection)
        return Lease(_served(name, offer, selection), rule)
    except (UnknownAdapter, AdapterForbidden):
        if not selection.or_base or selection.adapter_id is not None:
            raise
        return Lease(None, rule, missing=name)


def check_allowed(wish: str, names: tuple[str, ...], selection: Selection) -> None:
    """Raise AdapterForbidden unless the key may use one of ``names``; an allowed alias covers its version."""
    allowed = selection.allowed
    if allowed is not None and not set(names) & set(allowed):
        raise AdapterForbidden(wish, allowed, param=selection.named_by)


def stable_fraction(*parts: str) -> float:
    """A number in [0, 1) that depends only on ``parts``, equal in all processes and machines."""
    digest = hashlib.blake2b("\x1f".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _served(name: str, offer: AdapterOffer, selection: Selection) -> Adapter:
    adapter, state = offer.adapters.get(name), offer.states.get(name)
    if adapter is not None and (state in _SERVED or (selection.operator and state is AdapterState.STAGED)):
        return adapter
    why = None
    if state is AdapterState.RETIRED:
        why = "is retired"
    elif state is AdapterState.STAGED:
        why = "is staged: promote it, or ask with an operator's key"
    elif name in offer.refused:
        # The reason may name a folder or a bucket.
        why = f"was refused ({offer.refused[name] if selection.operator else 'operators are told why'})"
    raise _unknown(name, offer, selection, why)


def _unknown(name: str, offer: AdapterOffer, selection: Selection, why: str | None) -> UnknownAdapter:
    """The refusal, with the names that the caller may see."""
    known = tuple(one for one in offer.served if offer.usable(one, selection.allowed, selection.models))
    return UnknownAdapter(name, known, why=why, param=selection.named_by)


def _by_labels(labels: Mapping[str, str], offer: AdapterOffer) -> str | None:
    fit = [
        adapter
        for adapter in offer.adapters.values()
        if offer.states[adapter.adapter_id] is AdapterState.ACTIVE
        and labels.items() <= adapter.labels.items()
    ]
    return max(fit, key=lambda one: one.engine_id).adapter_id if fit else None
