"""The dashboard and the rules name only existing metrics, and show data once there is traffic.

Two real gateways, the second of which has the first as its remote worker, scraped by a real Prometheus with
the configuration and the rules of ``deploy/prometheus``: each process is a target of its own.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.integration.live import ADMIN_KEY, ROOT, LiveGateway, gateway, wait_ready
from tests.observability.families import documented, known_samples

DASHBOARD = json.loads((ROOT / "deploy/grafana/sluice.json").read_text())
RULES = ROOT / "deploy/prometheus"
# Between scrapes in the test; 15 s in the shipped file.
INTERVAL = "1s"
DATA_TIMEOUT_S = 60.0
REQUESTS = 24
PRICE = {"input_usd_per_million": 0.05, "output_usd_per_million": 0.2}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> list[tuple[str, str]]:
    return [(panel["title"], target["expr"]) for panel in panels() for target in panel["targets"]]


def filled(expr: str) -> str:
    """A query as Grafana would send it."""
    return expr.replace("$__rate_interval", "5m").replace("$instance", ".*")


def rules() -> list[dict[str, Any]]:
    groups = [
        group
        for name in ("recording.yaml", "alerts.yaml")
        for group in yaml.safe_load((RULES / name).read_text())["groups"]
    ]
    return [rule for group in groups for rule in group["rules"]]


def names_in(expr: str) -> set[str]:
    """Every metric that an expression names."""
    return set(re.findall(r"\b(?:sluice_\w+|sluice:[\w:]+|vllm:\w+|process_\w+)", expr))


def test_every_query_and_rule_names_only_existing_metrics() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    there = known_samples() | recorded
    asked = {name for _, expr in queries() for name in names_in(expr)}
    asked |= {name for rule in rules() for name in names_in(rule["expr"])}
    assert len(asked) > 60
    assert asked - there == set()


def test_every_recorded_series_is_used() -> None:
    used = {name for _, expr in queries() for name in names_in(expr)}
    used |= {name for rule in rules() for name in names_in(rule["expr"])}
    shown = (ROOT / "docs/metrics.md").read_text()
    assert {
        r["record"] for r in rules() if "record" in r and r["record"] not in used and r["record"] not in shown
    } == set()


def test_the_six_panels_of_a_serving_engine_are_there() -> None:
    titles = {panel["title"] for panel in panels()}
    assert titles >= {
        "Prefix cache hits", "Throughput", "Latency of whole answers", "Queue", "Preemptions",
        "Time to the first token",
    }  # fmt: skip


def test_panels_have_descriptions_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert max(x for x, _ in cells) < 24 and not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["description"], panel["title"]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


@dataclass(frozen=True)
class Scraped:
    """A Prometheus and the two gateways that it scrapes."""

    client: httpx.Client
    gateways: tuple[LiveGateway, LiveGateway]

    def query(self, expr: str) -> list[float]:
        """The finite values of an instant query."""
        answer = self.client.post("/api/v1/query", data={"query": expr}).json()
        assert answer["status"] == "success", (expr, answer)
        found = [float(series["value"][1]) for series in answer["data"]["result"]]
        return [value for value in found if math.isfinite(value)]

    def until(self, expr: str, met: Any = bool) -> list[float]:
        """Repeats the query until ``met`` accepts the values; returns them."""
        deadline = time.monotonic() + DATA_TIMEOUT_S
        while not met(found := self.query(expr)):
            assert time.monotonic() < deadline, f"{expr}: {found}"
            time.sleep(0.2)
        return found


def config(
    folder: Path, name: str, backends: dict[str, Any], engine: dict[str, Any], weights: list[Any]
) -> Path:
    """Writes the shipped configuration with other backends, engine and routing; returns its path."""
    shipped = yaml.safe_load((ROOT / "sluice.yaml").read_text())
    routing = yaml.safe_load((ROOT / "routing.yaml").read_text())
    routing["routes"]["self_hosted_generation"]["backends"] = weights
    (folder / f"{name}-routing.yaml").write_text(yaml.safe_dump(routing))
    path = folder / f"{name}.yaml"
    # Every sixth request to the remote worker is answered by the fallback chain.
    faults = [{"backend": "pool", "kind": "throttled", "every": 6}] if "pool" in backends else []
    shipped["chaos"] = {"enabled": bool(faults), "faults": faults}
    shipped |= {
        "backends": backends, "engine": shipped["engine"] | engine,
        "routing": {"file": str(folder / f"{name}-routing.yaml")},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(shipped))
    return path


def prometheus_config(folder: Path, targets: list[str]) -> Path:
    """Writes the shipped configuration with other targets and shorter intervals; returns its path."""
    shipped = yaml.safe_load((RULES / "prometheus.yaml").read_text())
    shipped["global"] = {
        "scrape_interval": INTERVAL,
        "scrape_timeout": INTERVAL,
        "evaluation_interval": INTERVAL,
    }
    shipped["rule_files"] = [str(RULES / name) for name in shipped["rule_files"]]
    [job] = shipped["scrape_configs"]
    job["static_configs"] = [{"targets": targets}]
    path = folder / "prometheus.yaml"
    path.write_text(yaml.safe_dump(shipped))
    return path


def replay(live: LiveGateway) -> None:
    """Sends ``REQUESTS`` valid requests and an invalid one; the second gateway answers some by a fallback."""
    with httpx.Client(base_url=live.url, headers=live.headers, timeout=60) as client:
        for number in range(REQUESTS):
            body: dict[str, Any] = {
                "messages": [{"role": "user", "content": f"Recommend something like number {number % 5}"}],
                "sampling": {"max_tokens": 6},
                "session_id": f"session-{number}",
            }
            answer = client.post("/v1/generate", json=body)
            assert answer.status_code == 200, answer.text
        assert client.post("/v1/generate", json={"messages": []}).status_code == 422


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed")
    one, two, own = (tmp_path_factory.mktemp(name) for name in ("one", "two", "prometheus"))
    engine = config(
        one, "one", {"local": {"kind": "engine", "price": PRICE}, "next": {"kind": "engine", "price": PRICE}}, {},
        [{"name": "local", "weight": 100}, {"name": "next", "weight": 0}],
    )  # fmt: skip
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with gateway(one, config=engine, ready=False) as first:
        pool = {
            "kind": "openai",
            "base_urls": [f"{first.url}/v1"],
            "model": "demo",
            "api_key_env": "POOL_KEY",
            "dialect": "sluice",
        }
        remote = config(two, "two", {"pool": pool}, {"kind": "none"}, [{"name": "pool", "weight": 100}])
        with gateway(two, config=remote, POOL_KEY=ADMIN_KEY) as second:
            wait_ready(first)
            targets = [live.url.removeprefix("http://") for live in (first, second)]
            with (own / "log").open("w") as log:
                process = subprocess.Popen(
                    [
                        "prometheus", f"--config.file={prometheus_config(own, targets)}",
                        f"--storage.tsdb.path={own}/data", f"--web.listen-address={address}",
                    ],
                    stdout=log, stderr=log,
                )  # fmt: skip
            try:
                with httpx.Client(base_url=f"http://{address}", timeout=30) as client:
                    found = Scraped(client, (first, second))
                    wait_up(found, process, own / "log")
                    start = {
                        "route": "self_hosted_generation",
                        "backend": "next",
                        "steps": [50, 100],
                        "window_seconds": 1,
                    }
                    answer = httpx.post(
                        f"{first.url}/admin/canary/start", json=start, headers=first.headers, timeout=60
                    )
                    assert answer.status_code == 200, answer.text
                    for live in found.gateways:
                        replay(live)
                    yield found
            finally:
                process.terminate()
                process.wait(60)


def wait_up(found: Scraped, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + DATA_TIMEOUT_S
    while True:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        try:
            ready = found.client.get("/-/ready").status_code == 200
            if ready and len(found.query("sluice_ready")) == 2:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)


def test_each_process_is_a_target_and_their_sum_is_what_callers_asked(scraped: Scraped) -> None:
    asked = 'sluice_tenant_requests_total{outcome=~"answered|fallback",instance=~"%s"}'
    first, second = (live.url.removeprefix("http://") for live in scraped.gateways)
    scraped.until(f"sum({asked % second})", lambda found: found == [REQUESTS])
    # The first gateway also gets the second one's requests, except those that a fallback answered.
    scraped.until(f"sum({asked % first})", lambda found: REQUESTS < sum(found) <= 2 * REQUESTS)
    scraped.until(f"count(sum by (instance) ({asked % '.*'}))", lambda found: found == [2.0])
    scraped.until('sum(sluice_requests_total{code="invalid_request"})', lambda found: found == [2.0])


def test_every_line_on_standard_error_is_json_the_engines_too(scraped: Scraped) -> None:
    lines = [json.loads(line) for live in scraped.gateways for line in live.log.read_text().splitlines()]
    assert {line.get("process") for line in lines} == {None, "engine"}
    assert all({"event", "level", "logger", "timestamp"} <= line.keys() for line in lines)


def test_the_cost_metrics_equal_the_ledgers_costs(scraped: Scraped) -> None:
    live = scraped.gateways[0]

    def billed() -> int:
        answer = httpx.get(f"{live.url}/admin/usage", headers=live.headers, timeout=60)
        return sum(row["cost_nanousd"] for row in answer.json()["rows"])

    deadline = time.monotonic() + DATA_TIMEOUT_S
    while not billed() or live.metric("sluice_cost_usd_total") != pytest.approx(billed() / 1e9):
        assert time.monotonic() < deadline, (billed(), live.metric("sluice_cost_usd_total"))
        time.sleep(0.2)
    assert live.metric("sluice_tenant_cost_usd_total") == pytest.approx(billed() / 1e9)


def test_every_query_of_the_dashboard_returns_data(scraped: Scraped) -> None:
    for _, expr in queries():
        scraped.until(filled(expr))
    for note in DASHBOARD["annotations"]["list"]:
        scraped.query(filled(note["expr"]))  # a valid query; it has data only after a change


def test_the_rules_are_healthy_and_no_alert_of_a_broken_gateway_fires(scraped: Scraped) -> None:
    groups = scraped.client.get("/api/v1/rules").json()["data"]["groups"]
    states = {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}
    assert len(states) > 40
    assert {name: health for name, health in states.items() if health == "err"} == {}
    firing = {rule["name"] for group in groups for rule in group["rules"] if rule.get("state") == "firing"}
    assert (
        firing
        & {"SluiceDown", "SluiceNotReady", "SluiceErrors", "SluiceStateStoreAway", "SluiceLedgerRowsLost"}
        == set()
    )


def test_a_scrape_is_well_formed(scraped: Scraped) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    for live in scraped.gateways:
        text = httpx.get(f"{live.url}/metrics", timeout=60).content
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=text, capture_output=True, check=False
        )
        faults = [
            line
            for line in checked.stderr.decode().splitlines()
            if "parsing" in line or "error" in line.lower()
        ]
        assert faults == []


def test_every_metric_of_a_running_gateway_is_documented(scraped: Scraped) -> None:
    exposed = {
        line.split()[2]
        for live in scraped.gateways
        for line in httpx.get(f"{live.url}/metrics", timeout=60).text.splitlines()
        if line.startswith("# TYPE ")
    }
    assert exposed - set(documented()) == set()
