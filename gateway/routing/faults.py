"""Messages about faults of a routing configuration: the path, what was given, what is allowed."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ValidationError

from gateway.config.admission import RungConfig
from gateway.contracts.refusals import allowed
from gateway.routing.file import (
    AdapterRule,
    BudgetsConfig,
    RouteConfig,
    RouteShadow,
    RoutingConfig,
    Slo,
    WeightedBackend,
)
from gateway.routing.route_limits import RouteAdmission, RouteResume

# Longest part of a path, or of a wrong value, that a message repeats.
MAX_SHOWN = 60
_PARTS: Mapping[str, type[BaseModel]] = MappingProxyType(
    {
        "backends": WeightedBackend,
        "adapter_rules": AdapterRule,
        "slo": Slo,
        "shadow": RouteShadow,
        "budgets": BudgetsConfig,
        "admission": RouteAdmission,
        "ladder": RungConfig,
        "resume": RouteResume,
    }
)


def faults_of(error: ValidationError) -> list[str]:
    """One line for each fault, beginning with its path in the file."""
    return [_line(fault) for fault in error.errors(include_url=False)]


def _line(fault: Any) -> str:
    path, kind, context = _path(fault["loc"]), fault["type"], fault.get("ctx", {})
    if kind == "missing":
        return f"{path}: is missing; it is required"
    if kind == "extra_forbidden":
        return f"{path}: unknown key; allowed: {', '.join(_keys(fault['loc']))}"
    text = str(context.get("error", ""))
    if kind == "value_error" and not text.startswith("allowed: "):
        return f"{path}: {text}"
    return f"{path}: given {_given(fault['input'])}; allowed: {allowed(kind, context)}"


def _path(loc: tuple[int | str, ...]) -> str:
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += ("." if path else "") + _short(part)
    return path or "file"


def _keys(loc: tuple[int | str, ...]) -> list[str]:
    """The keys that are allowed in place of an unknown one."""
    if len(loc) == 1:
        return list(RoutingConfig.model_fields)
    part = next((one for one in reversed(loc[2:-1]) if one in _PARTS), None)
    model = RouteConfig if part is None else _PARTS[str(part)]
    return list(model.model_fields)


def _given(value: object) -> str:
    if isinstance(value, dict):
        return f"a mapping of {len(value)}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return _short(repr(value))


def _short(text: str) -> str:
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
