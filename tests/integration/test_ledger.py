"""The ledger of a real gateway, as operators look at it."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from typing import Any

import httpx
from typer.testing import CliRunner

from ops.cli.main import app
from tests.integration.live import ADMIN_KEY, LiveGateway

# The longest delay of reports that is documented, in seconds.
# The bound of these tests, because a busy machine takes longer.
PATIENCE_S = 60.0


def ask(live: LiveGateway, **more: object) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "Who wrote Berserk?"}], "sampling": {"temperature": 0}}
    answer = httpx.post(f"{live.url}/v1/generate", json={**body, **more}, headers=live.headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def usage(live: LiveGateway, **query: str) -> httpx.Response:
    return httpx.get(f"{live.url}/admin/usage", params=query, headers=live.headers, timeout=60)


def test_usage_is_summed_up_within_five_seconds(live: LiveGateway) -> None:
    since = str(time.time())
    answers = [ask(live, intent="usage-test") for _ in range(2)]
    deadline = time.monotonic() + PATIENCE_S
    while not (rows := usage(live, by="tenant,adapter,backend,day", since=since).json()["rows"]) or (
        rows[0]["requests"] < 2
    ):
        assert time.monotonic() < deadline, rows
        time.sleep(0.05)
    [found] = rows
    assert (found["tenant"], found["adapter"], found["backend"]) == ("default", None, "local")
    for name in ("input_tokens", "output_tokens", "cached_tokens"):
        assert found[name] == sum(answer["usage"][name] for answer in answers)
    assert found["margin_tokens"] == found["cached_tokens"]
    assert {"requests", "cost_nanousd", "day"} <= found.keys()


def test_a_wrong_query_is_refused_with_what_is_allowed(live: LiveGateway) -> None:
    for query, word in (
        ({"by": "tenants"}, "tenant, org"),
        ({"since": "yesterday"}, "ISO 8601"),
        (
            {"since": "2026-01-02", "until": "2026-01-01"},
            "until is 2026-01-01T00:00:00+00:00, and since is 2026-01-02T",
        ),
        ({"group": "tenant"}, "group is not a known field"),
        ({"kind": "all"}, "'request', 'shadow', 'front' or 'cache'"),
    ):
        refused = usage(live, **query)
        assert refused.status_code == 422 and word in refused.json()["error"]["message"], refused.text
    assert httpx.get(f"{live.url}/admin/usage", timeout=60).status_code == 401


def test_the_command_reports_exports_and_reconciles(live: LiveGateway, tmp_path: Path) -> None:
    answer = ask(live)
    words = ["--url", live.url, "--key", ADMIN_KEY]
    deadline = time.monotonic() + PATIENCE_S
    rows: list[dict[str, str]] = []
    while answer["request_id"] not in [row["request_id"] for row in rows]:
        assert time.monotonic() < deadline
        to = tmp_path / "rows.csv"
        assert CliRunner().invoke(app, ["usage", "export", "-o", str(to), *words]).exit_code == 0
        with to.open(newline="") as file:
            rows = list(csv.DictReader(file))
    [row] = [one for one in rows if one["request_id"] == answer["request_id"]]
    none = CliRunner().invoke(app, ["usage", "export", "--since", "2999-01-01", *words])
    assert none.stdout.splitlines() == [",".join(row)]
    assert int(row["output_tokens"]) == answer["usage"]["output_tokens"] == int(row["billable_output_tokens"])
    assert (row["model"], row["kind"]) == ("demo", "request")

    shown = CliRunner().invoke(app, ["usage", "report", "--by", "backend", *words])
    assert shown.exit_code == 0 and "local" in shown.output
    assert "no price" in shown.output and "set ledger.prices or backends.NAME.price" in shown.output
    done = CliRunner().invoke(app, ["usage", "reconcile", "--json", *words])
    assert done.exit_code == 0
    fresh = [row["verdict"] for row in json.loads(done.output)["rows"]]
    assert all(verdict == "equal" or verdict.startswith("not compared") for verdict in fresh), fresh
    refused = CliRunner().invoke(app, ["usage", "report", "--by", "tenants", *words])
    assert refused.exit_code == 1
