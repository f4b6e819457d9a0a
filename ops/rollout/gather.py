"""Asks a live gateway, and Prometheus when one is named, for the facts of the checklist."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ops.client import AdminClient, AdminError
from ops.rollout.facts import Facts, Sample

TIMEOUT_S = 20.0
MAX_ANSWER_BYTES = 32 << 20


def gather(
    client: AdminClient,
    *,
    prometheus: str | None,
    replay: Path | None,
    soak: Path | None,
    drain_s: float | None,
    grace_s: float | None,
) -> Facts:
    """Ask for everything, a question at a time.

    Raises:
        AdminError: the gateway does not answer or refuses the key; a file cannot be read.
    """
    return Facts(
        ready=_object(client, "ready"),
        deep=_object(client, "health", "deep"),
        routing=client.get("admin", "routing"),
        rollback=_rollback(client),
        adapters=client.get("admin", "adapters"),
        canary=client.get("admin", "canary"),
        shadow=client.get("admin", "shadow"),
        samples=samples_of(_text(f"{client.url.rstrip('/')}/metrics", client.key)),
        open_admin=_open_admin(client),
        rules=None if prometheus is None else _rules(prometheus),
        replay=_figures(replay),
        soak=_figures(soak),
        drain_s=drain_s,
        grace_s=grace_s,
    )


def samples_of(text: str) -> Mapping[str, list[Sample]]:
    """A scrape's samples by name."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def _object(client: AdminClient, *path: str) -> Mapping[str, Any]:
    """The JSON of a health check, whose 503 has a body as good as its 200."""
    text = _text(f"{client.url.rstrip('/')}/{'/'.join(path)}", client.key, takes=(503,))
    try:
        found = json.loads(text)
    except ValueError:
        raise AdminError(f"/{'/'.join(path)}: no JSON came; is that a gateway?") from None
    if not isinstance(found, dict):
        raise AdminError(f"/{'/'.join(path)}: no JSON object came; is that a gateway?")
    return found


def _rollback(client: AdminClient) -> Mapping[str, Any] | str:
    try:
        found: Mapping[str, Any] = client.post("admin", "routing", "rollback", body=b'{"dry_run": true}')
    except AdminError as refused:
        return str(refused)
    return found


def _open_admin(client: AdminClient) -> bool:
    try:
        AdminClient(client.url, None, client.timeout_s).get("admin", "routing")
    except AdminError:
        return False
    return True


def _rules(prometheus: str) -> Mapping[str, Any] | str:
    try:
        found = json.loads(_text(f"{prometheus.rstrip('/')}/api/v1/rules", None))
    except (AdminError, ValueError) as error:
        return str(error)
    return found if isinstance(found, dict) else "no rules came"


def _figures(file: Path | None) -> Mapping[str, Any] | None:
    if file is None:
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        found["requests"]["sent"], found["goodput"]["within_slo"], found["wall_s"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reported = getattr(error, "strerror", None) or "it is no file of `sluice replay --output`"
        raise AdminError(f"{file}: {reported}") from None
    figures: Mapping[str, Any] = found
    return figures


def _text(url: str, key: str | None, takes: tuple[int, ...] = ()) -> str:
    if not url.startswith(("http://", "https://")):
        raise AdminError(f"{url!r} is no address; allowed: http://HOST:PORT")
    request = urllib.request.Request(url)
    if key:
        request.add_header("authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            text: bytes = answer.read(MAX_ANSWER_BYTES)
    except urllib.error.HTTPError as error:
        if error.code not in takes:
            raise AdminError(f"{url}: {error.code} {error.reason}") from None
        text = error.read(MAX_ANSWER_BYTES)
    except OSError as error:
        raise AdminError(f"{url}: no answer ({getattr(error, 'reason', error)})") from None
    return text.decode("utf-8", errors="replace")
