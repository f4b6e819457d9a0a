"""Logs a report as a run of an experiment tracker; MLflow is the only one."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from evaluation.shadow_compare.page import page

# By its own defaults MLflow retries an unreachable server for four minutes (measured), and reports its use to
# its makers. A variable that is already set is not changed.
DEFAULTS: Mapping[str, str] = MappingProxyType(
    {
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
)

SHARES = (
    "answered",
    "same_finish_reason",
    "same_tools",
    "same_calls",
    "same_language",
    "length_ratio",
    "likeness",
)


class TrackingError(Exception):
    """The tracker cannot be used; the message says what to do."""


@dataclass(frozen=True, slots=True)
class MlflowTracker:
    """MLflow, from the extra ``mlflow``.

    Args:
        uri: of the tracking server, or ``sqlite:///FILE``.
        experiment: its name; created when it does not exist.
    """

    uri: str
    experiment: str

    def log(
        self,
        name: str,
        *,
        tags: Mapping[str, str],
        metrics: Mapping[str, float],
        files: Mapping[str, str],
    ) -> str:
        """Log a run and its files, by name; its id. Raises TrackingError."""
        for variable, value in DEFAULTS.items():
            os.environ.setdefault(variable, value)
        try:
            mlflow = importlib.import_module("mlflow")
        except ImportError:
            raise TrackingError("--mlflow needs MLflow: pip install 'sluice-gateway[mlflow]'") from None
        try:
            mlflow.set_tracking_uri(self.uri)
            mlflow.set_experiment(self.experiment)
            with mlflow.start_run(run_name=name, tags=dict(tags)) as run:
                mlflow.log_metrics(dict(metrics))
                for file, text in files.items():
                    mlflow.log_text(text, file)
                return str(run.info.run_id)
        except (mlflow.exceptions.MlflowException, OSError) as error:
            raise TrackingError(f"{self.uri}: {str(error).splitlines()[0]}") from None


def log_report(report: Mapping[str, Any], tracker: MlflowTracker, *, as_text: str) -> str:
    """Log the figures over all pairs of a report, and the report as JSON (``as_text``) and as a page.

    Raises:
        TrackingError: the tracker refuses.
    """
    versions = {side: ", ".join(report[side])[:5_000] for side in ("primary", "shadow")}
    return tracker.log(
        f"{versions['shadow']} beside {versions['primary']}"[:250],
        tags={f"sluice.{side}": version for side, version in versions.items()},
        metrics=figures(report),
        files={"shadow.json": as_text, "shadow.html": page(report)},
    )


def figures(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures over all pairs, by names that a tracker accepts."""
    found = {"pairs": float(report["pairs"]), "compared": float(report["compared"])}
    if not report["groups"]:
        return found
    whole = report["groups"][0]
    for one in whole["checks"]:
        for side in ("primary", "shadow", "difference"):
            found |= _ends(f"check.{one['check']}.{side}", one[side])
    for one in whole["numbers"]:
        for side in ("primary", "shadow"):
            found |= {f"{one['measure']}.{side}.{part}": value for part, value in one[side].items()}
        found |= _ends(f"{one['measure']}.difference", one["difference"])
    for name in SHARES:
        if whole[name] is not None:
            found |= _ends(name, whole[name])
    for side, count in (whole["judged"] or {}).items():
        found[f"judged.{side}"] = float(count)
    return found


def _ends(name: str, interval: Mapping[str, float | None]) -> dict[str, float]:
    return {
        f"{name}.{part}": value for part in ("mean", "low", "high") if (value := interval[part]) is not None
    }
