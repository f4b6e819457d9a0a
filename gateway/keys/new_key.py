"""Compares a new key with the routes, adapters, models and prices that exist now."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Final

from accounting.keys import NO_BUDGET, KeyRecord
from gateway.backends.port import Fleet
from gateway.contracts.refusals import not_allowed
from gateway.routing.revision import Revision

MAX_SHOWN: Final = 20  # the most names that a message lists


@dataclass(frozen=True, slots=True)
class NewKeyChecks:
    """What exists now; ``is_priced``: whether a price covers a backend, given its name and model."""

    revision: Callable[[], Revision]
    fleet: Fleet
    adapters: Collection[str]
    is_priced: Callable[[str, str], bool]

    def warnings(self, key: KeyRecord) -> list[str]:
        """Return a warning for each name that does not exist now, and for each budget that not all counts to.

        Raises InvalidRequest: nothing that the key may use has a price, so that a budget would limit nothing.
        """
        return [*self._unknown(key), *self._unpriced(key)]

    def _unknown(self, key: KeyRecord) -> Iterator[str]:
        routes, models = self.revision().routes, self.fleet.base_models
        selecting = {*self.fleet.aliases, *self.fleet.backends, *self.revision().route_of, *self.adapters}
        given: dict[str, tuple[Collection[str], Collection[str]]] = {
            "routes": (key.routes or (), routes),
            "adapters": (key.adapters or (), self.adapters),
            "models": (key.models or (), models),
            "aliases": ([model for _, model in key.aliases], {*models, *selecting}),
            "model_limits": ([one.model for one in key.model_limits], models),
        }
        for field, (names, known) in given.items():
            for name in names:
                if name not in known:
                    yield f"{field}: there is no {name!r} now; known: {_listed(known)}"

    def _unpriced(self, key: KeyRecord) -> Iterator[str]:
        routes = self.revision().routes
        names = {*self.fleet.backends} if key.routes is None else set()
        names.update(one for name in key.routes or () if name in routes for one in routes[name].backends)
        usable = {
            name: backend.model
            for name, backend in self.fleet.backends.items()
            if name in names and (key.models is None or backend.model in key.models)
        }
        budgets = {"budget": (key.budget, usable)}
        for one in key.model_limits:
            backends = {name: model for name, model in usable.items() if model == one.model}
            budgets[f"model_limits.{one.model}"] = (one.budget, backends)
        for field, (budget, backends) in budgets.items():
            free = [name for name, model in backends.items() if not self.is_priced(name, model)]
            if budget == NO_BUDGET or not free:
                continue
            if len(free) == len(backends):
                raise not_allowed(
                    field,
                    f"is in US dollars, and would limit nothing: no price covers {_listed(free)} now",
                    "limits of tokens, or prices: backends.<name>.price, models.<id>.price, ledger.prices",
                )
            yield f"{field}: no price covers {_listed(free)} now; what they answer costs nothing"


def _listed(names: Collection[str]) -> str:
    # The model of a pool is empty until one of its workers is reached.
    shown = sorted(filter(None, names))
    more = f" and {len(shown) - MAX_SHOWN} more" if len(shown) > MAX_SHOWN else ""
    return (", ".join(shown[:MAX_SHOWN]) or "none") + more
