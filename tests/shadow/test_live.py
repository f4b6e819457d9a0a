"""A real gateway whose engine's answers are compared with Bedrock's, played by the stand-in."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from benchmarks.bedrock.stand_in import ANSWER, StandIn, stand_in
from evaluation.shadow_compare.__main__ import main as compare
from ops.cli.main import app
from tests.bedrock.conftest import CREDENTIALS, HAIKU
from tests.integration.live import ADMIN_KEY, ROOT, LiveGateway, gateway

pytestmark = pytest.mark.xdist_group("shadow-live")
COUNT = 12
QUESTIONS = ("Who wrote Vinland Saga?", "How much is shipping to Spain?", "Something like Berserk, please?")


def config(folder: Path, bedrock: StandIn) -> Path:
    """Write a gateway's configuration: its route mirrors every request to Bedrock, and its own model judges."""
    settings = yaml.safe_load((ROOT / "sluice.yaml").read_text())
    settings["backends"]["bedrock"] = {
        "kind": "bedrock",
        "model_id": HAIKU,
        "region": "us-east-1",
        "endpoint_url": bedrock.url,
        "price": {"input_usd_per_million": 0.25, "output_usd_per_million": 1.25},
    }
    settings["shadow"] = {
        "forbidden": ["both worth reading"],
        "judge": {"backend": "local", "sample": 1.0, "max_tokens": 4},
    }
    routing = yaml.safe_load((ROOT / "routing.yaml").read_text())
    [route] = routing["routes"].values()
    route["shadow"] = {"backend": "bedrock", "sample": 1.0}
    (folder / "routing.yaml").write_text(yaml.safe_dump(routing))
    settings["routing"] = {"file": str(folder / "routing.yaml")}
    (folder / "sluice.yaml").write_text(yaml.safe_dump(settings))
    return folder / "sluice.yaml"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveGateway]:
    folder = tmp_path_factory.mktemp("shadow")
    with stand_in() as bedrock, gateway(folder, config=config(folder, bedrock), **CREDENTIALS) as live:
        for number in range(COUNT):
            answer = httpx.post(
                f"{live.url}/v1/generate",
                json={
                    "messages": [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}],
                    "intent": "catalog" if number % 2 else "shop",
                    "sampling": {"max_tokens": 24, "temperature": 0},
                },
                headers=live.headers,
                timeout=60,
            ).json()
            assert answer["backend"] == "embedded" and answer["output_text"] != "".join(ANSWER)
        deadline = time.monotonic() + 60
        while live.metric("sluice_shadow_pairs_total") < COUNT:
            assert time.monotonic() < deadline, live.log.read_text()[-2_000:]
            time.sleep(0.05)
        yield live


def report(live: LiveGateway, **query: Any) -> Any:
    answer = httpx.get(f"{live.url}/admin/shadow", params=query, headers=live.headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_every_answer_has_been_compared_with_the_other_backends(live: LiveGateway) -> None:
    found = report(live)
    assert (found["pairs"], found["compared"]) == (COUNT, COUNT)
    assert found["primary"] == ["demo"] and found["shadow"] == [HAIKU]
    whole = found["groups"][0]
    checks = {one["check"]: one for one in whole["checks"]}
    assert checks["forbidden"]["shadow"]["mean"] == 0.0 and checks["forbidden"]["primary"]["mean"] == 1.0
    assert checks["shape"]["shadow"]["mean"] == 1.0
    numbers = {one["measure"]: one for one in whole["numbers"]}
    assert numbers["cost_nanousd"]["shadow"]["mean"] > 0 == numbers["cost_nanousd"]["primary"]["mean"]
    assert {one["value"] for one in found["groups"] if one["by"] == "intent"} == {"catalog", "shop"}
    assert 0 <= whole["likeness"]["mean"] < 0.6


def test_the_page_may_be_asked_for_less_and_refuses_what_it_does_not_know(live: LiveGateway) -> None:
    assert report(live, limit=5)["pairs"] == 5
    assert report(live, route="self_hosted_generation")["pairs"] == COUNT
    assert report(live, since=4e9)["pairs"] == report(live, since="2999-01-01")["pairs"] == 0
    assert report(live, since="2020-01-01T00:00:00+01:00")["pairs"] == COUNT
    for query in ({"limit": "0"}, {"limit": "many"}, {"limit": "10001"}, {"since": "nan"}, {"since": "x"}):
        refused = httpx.get(f"{live.url}/admin/shadow", params=query, headers=live.headers, timeout=60)
        assert refused.status_code == 422, query
        assert refused.json()["error"]["param"] == next(iter(query))
    unknown = httpx.get(f"{live.url}/admin/shadow?route=other", headers=live.headers, timeout=60)
    assert unknown.status_code == 404
    assert "known: self_hosted_generation" in unknown.json()["error"]["message"]
    assert httpx.get(f"{live.url}/admin/shadow", timeout=60).status_code == 401


def test_the_ledger_has_the_shadows_as_rows_of_their_own_kind(live: LiveGateway) -> None:
    deadline, query = (
        time.monotonic() + 60,
        "SELECT kind, tenant, SUM(output_tokens) FROM generations "
        "WHERE kind <> 'shadow' OR backend = 'bedrock' GROUP BY 1, 2",
    )
    while True:
        with sqlite3.connect(live.folder / "ledger.db") as database:
            rows = {row[0]: row[1:] for row in database.execute(query)}
        if rows.get("shadow", ("", 0))[1] == COUNT * len(ANSWER):
            break
        assert time.monotonic() < deadline, rows
        time.sleep(0.05)
    assert rows["shadow"][0] == "" and rows["request"][0] != ""


def test_a_model_of_the_gateway_judges_and_its_work_is_no_tenants(live: LiveGateway) -> None:
    judged = report(live)["groups"][0]["judged"]
    assert judged and set(judged) <= {"primary", "shadow", "tie", "unclear"}
    asked = "SELECT COUNT(*), MAX(tenant), MAX(output_tokens) FROM generations WHERE kind = 'shadow' AND backend = 'embedded'"
    deadline = time.monotonic() + 60
    while True:
        with sqlite3.connect(live.folder / "ledger.db") as database:
            [(rows, tenant, tokens)] = database.execute(asked)
        if rows >= sum(judged.values()):
            break
        assert time.monotonic() < deadline, (rows, judged)
        time.sleep(0.05)
    assert 1 <= rows <= COUNT and tenant == "" and tokens <= 4


def test_the_command_shows_tables_json_and_a_page(live: LiveGateway, tmp_path: Path) -> None:
    words = ["--url", live.url, "--key", ADMIN_KEY]
    shown = CliRunner(env={"COLUMNS": "130"}).invoke(app, ["shadow", "report", *words])
    assert shown.exit_code == 0, shown.output
    assert f"{COUNT} of {COUNT} pairs compared" in shown.output and "passes forbidden" in shown.output
    shown = CliRunner().invoke(
        app, ["shadow", "report", "--json", "--limit", "3", "--since", "2020-01-01", *words]
    )
    assert json.loads(shown.stdout)["pairs"] == 3
    (tmp_path / "report.json").write_text(shown.stdout)
    page = tmp_path / "page.html"
    assert compare(["--report", str(tmp_path / "report.json"), "--html", str(page)]) == 0
    assert "<svg" in page.read_text()
    refused = CliRunner().invoke(app, ["shadow", "report", "--url", live.url, "--key", "wrong"])
    assert refused.exit_code == 1 and "invalid_key" in refused.output


def test_the_comparison_runs_without_a_gateway_too(
    live: LiveGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = f"sqlite+aiosqlite:///{live.folder}/ledger.db"
    assert compare(["--ledger", ledger, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pairs"] == COUNT
    assert compare(["--ledger", f"sqlite+aiosqlite:///{live.folder}/none/ledger.db"]) == 2
    assert "is not there" in capsys.readouterr().err
