"""Events of loading and using adapters, for metrics and logs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterAsked:
    """A request needs an adapter; ``resident``: it was loaded already."""

    adapter_id: str
    resident: bool


@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    """An engine has taken an adapter; ``ahead``: before a request asked for it."""

    adapter_id: str
    load_s: float
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class AdapterLoadFailed:
    """An engine could not load an adapter."""

    adapter_id: str
    code: str
    detail: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class AdapterUnloaded:
    """An engine has unloaded an adapter; ``reason``: ``room`` for another one, or ``retired``."""

    adapter_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class AdapterReplacedByBase:
    """The base model answered because the adapter could not be used, as the route allows."""

    adapter_id: str


AdapterEvent = AdapterAsked | AdapterLoaded | AdapterLoadFailed | AdapterUnloaded | AdapterReplacedByBase
