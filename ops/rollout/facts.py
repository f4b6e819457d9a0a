"""The facts for the checklist: answers of a live gateway, and of Prometheus if one is given."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.samples import Sample

from gateway.config.settings import load_settings
from observability.metrics_text import samples_of
from ops.client import AdminClient, AdminError
from ops.rollout.options import RolloutOptions

DRY_RUN = {"dry_run": True}


@dataclass(frozen=True, slots=True)
class Facts:
    """Answers of one gateway's paths with these names, and the operator's options.

    Args:
        rollback: the result of a dry-run rollback; the gateway's error message if it would refuse.
        metrics: the page ``/metrics``.
        open_admin: whether ``/admin`` answers without a key.
        rules: ``GET /api/v1/rules`` of Prometheus, or why there is no answer; None if none was given.
        replay: figures of ``sluice replay --output`` over a trace of the real workload.
        soak: the same of a long replay.
        grace_s: seconds between SIGTERM and SIGKILL where the gateway runs.
    """

    ready: Mapping[str, Any]
    deep: Mapping[str, Any]
    routing: Mapping[str, Any]
    rollback: Mapping[str, Any] | str
    adapters: Mapping[str, Any]
    canary: Mapping[str, Any]
    shadow: Mapping[str, Any]
    evaluations: Mapping[str, Any] = field(default_factory=dict)
    metrics: str = ""
    open_admin: bool = False
    rules: Mapping[str, Any] | str | None = None
    replay: Mapping[str, Any] | None = None
    soak: Mapping[str, Any] | None = None
    drain_s: float | None = None
    grace_s: float | None = None

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        return sum(sample.value for sample in self.having(name, **labels))

    def having(self, name: str, **labels: str) -> Iterator[Sample]:
        """A metric's samples that have these labels."""
        return (one for one in samples_of(self.metrics, name) if labels.items() <= one.labels.items())


def gather(client: AdminClient, options: RolloutOptions) -> Facts:
    """Fetch all facts, one at a time.

    Raises AdminError: the gateway does not answer or refuses the key; a file cannot be read. Raises
    ConfigError: the configuration is not valid.
    """
    drain_s = None if options.config is None else load_settings(options.config).server.drain_seconds
    keyless = AdminClient(client.url, None, client.timeout_s)
    prometheus = (
        None if options.prometheus is None else AdminClient(options.prometheus, kind="Prometheus server")
    )
    return Facts(
        # A health check's 503 has the same body as its 200.
        ready=client.get("ready", accept=(503,)),
        deep=client.get("health", "deep", accept=(503,)),
        routing=client.get("admin", "routing"),
        rollback=_answer_or_error(lambda: client.post("admin", "routing", "rollback", body=DRY_RUN)),
        adapters=client.get("admin", "adapters"),
        canary=client.get("admin", "canary"),
        shadow=client.get("admin", "shadow"),
        evaluations=client.get("admin", "evaluations"),
        metrics=client.text("metrics"),
        open_admin=not isinstance(_answer_or_error(lambda: keyless.get("admin", "routing")), str),
        rules=None if prometheus is None else _answer_or_error(lambda: prometheus.get("api", "v1", "rules")),
        replay=_figures(options.replay),
        soak=_figures(options.soak),
        drain_s=drain_s,
        grace_s=options.grace,
    )


def _answer_or_error(call: Callable[[], Any]) -> Mapping[str, Any] | str:
    try:
        found: Mapping[str, Any] = call()
    except AdminError as error:
        return str(error)
    return found


def _figures(file: Path | None) -> Mapping[str, Any] | None:
    if file is None:
        return None
    try:
        found: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        found["goodput"]["within_slo"], found["wall_s"]
        for count in ("sent", "errors", "unfinished", "interrupted"):
            found["requests"][count]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reported = getattr(error, "strerror", None) or "it is no file of `sluice replay --output`"
        raise AdminError(f"{file}: {reported}") from None
    return found
