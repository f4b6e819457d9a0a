"""Batches of a real gateway, by the official client: from the upload to the results, and through a kill."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI
from typer.testing import CliRunner

from ops.cli.main import app
from tests.integration.live import ADMIN_KEY, LiveGateway, gateway

LINES = 40


def client_of(live: LiveGateway) -> OpenAI:
    return OpenAI(base_url=f"{live.url}/v1", api_key=ADMIN_KEY, timeout=60)


def requests(count: int, endpoint: str, **body: Any) -> bytes:
    return b"".join(
        json.dumps({"custom_id": f"r{number}", "method": "POST", "url": endpoint, "body": body}).encode()
        + b"\n"
        for number in range(count)
    )


def ended(client: OpenAI, batch_id: str) -> Any:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        batch = client.batches.retrieve(batch_id)
        if batch.status in ("completed", "failed", "expired", "cancelled"):
            return batch
        time.sleep(0.2)
    raise AssertionError(batch)


def begun(client: OpenAI, count: int, endpoint: str, **body: Any) -> str:
    content = requests(count, endpoint, **{"model": "demo", **body})
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    asked: Any = {"input_file_id": file.id, "endpoint": endpoint, "completion_window": "24h"}
    return client.batches.create(**asked).id


def outputs(client: OpenAI, batch: Any) -> dict[str, Any]:
    lines = [json.loads(one) for one in client.files.content(batch.output_file_id).text.splitlines()]
    return {one["custom_id"]: one["response"]["body"] for one in lines}


def test_the_official_client_runs_a_batch_of_each_endpoint(tmp_path: Path) -> None:
    hi = [{"role": "user", "content": "hi"}]
    with gateway(tmp_path) as live:
        client = client_of(live)
        ids = {
            endpoint: begun(client, 3, endpoint, **body)
            for endpoint, body in (
                ("/v1/chat/completions", {"messages": hi, "max_tokens": 4}),
                ("/v1/completions", {"prompt": "Once", "max_tokens": 4}),
                ("/v1/responses", {"input": "hi", "max_output_tokens": 16}),
                ("/v1/embeddings", {"input": "a book about the sea"}),
            )
        }
        done = {endpoint: ended(client, batch_id) for endpoint, batch_id in ids.items()}
        assert {one.status for one in done.values()} == {"completed"}
        bodies = {endpoint: outputs(client, one)["r0"] for endpoint, one in done.items()}
        assert bodies["/v1/chat/completions"]["object"] == "chat.completion"
        assert bodies["/v1/completions"]["object"] == "text_completion"
        assert bodies["/v1/embeddings"]["data"][0]["embedding"]
        stored = client.responses.retrieve(bodies["/v1/responses"]["id"])
        assert stored.output_text == bodies["/v1/responses"]["output"][0]["content"][0]["text"]
        totals = [sum(one.usage.total_tokens for one in done.values())]
        rows = httpx.get(
            f"{live.url}/admin/usage", headers={"authorization": f"Bearer {ADMIN_KEY}"}
        ).raise_for_status()
        assert totals == [sum(row["input_tokens"] + row["output_tokens"] for row in rows.json()["rows"])]


def test_the_command_submits_follows_and_collects(tmp_path: Path) -> None:
    given, got = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_bytes(requests(3, "/v1/completions", model="demo", prompt="Once", max_tokens=4))
    with gateway(tmp_path) as live:

        def run(*words: str) -> Any:
            return CliRunner().invoke(app, ["batch", *words, "--url", live.url, "--key", ADMIN_KEY])

        done = run("submit", str(given), "--wait", "--json")
        assert done.exit_code == 0, done.output
        batch = json.loads(done.stdout)
        assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
        assert run("results", batch["id"], "-o", str(got)).exit_code == 0
        assert len(got.read_text().splitlines()) == 3
        shown = run("results", batch["id"])
        assert shown.stdout == got.read_text()
        nowhere = run("results", batch["id"], "-o", str(tmp_path / "none" / "out.jsonl"))
        assert nowhere.exit_code == 1 and "cannot be written" in nowhere.output
        assert "completed" in run("status").stdout
        assert json.loads(run("status", batch["id"], "--json").stdout)["id"] == batch["id"]
        none = run("results", batch["id"], "--errors")
        assert none.exit_code == 1 and "has no errors" in none.output
        given.write_text('{"custom_id": "a"}\n')
        assert "give --endpoint" in run("submit", str(given)).output
        wrong = run("submit", str(given), "--endpoint", "/v1/completions", "--wait")
        assert wrong.exit_code == 1 and "line 1: method is not POST" in wrong.output
        given.write_bytes(requests(1, "/v1/completions", model="demo", prompt="Once", sluice={"[/b]": 1}))
        wrong = run("submit", str(given), "--wait")  # what a line contains is no markup of the table
        assert wrong.exit_code == 1 and "[/b]" in wrong.output
        given.write_bytes(b"\n")
        wrong = run("submit", str(given), "--endpoint", "/v1/completions", "--wait")
        assert wrong.exit_code == 1 and "in.jsonl: it is empty" in wrong.output
        assert "None" not in wrong.output
        assert "not_found" in run("cancel", "batch_x", "--yes").output


def test_lines_for_a_worker_that_is_away_do_not_take_the_gateway_from_its_callers(tmp_path: Path) -> None:
    config, hi = tmp_path / "sluice.json", [{"role": "user", "content": "hi"}]
    away = {"kind": "openai", "base_urls": ["http://127.0.0.1:9/v1"], "model": "away"}
    backends = {"local": {"kind": "engine"}, "away": away}
    routes = {name: {"backends": [{"name": name, "weight": 100}], "fallback": []} for name in backends}
    (tmp_path / "routing.yaml").write_text(json.dumps({"routes": routes}))
    routing = {"file": str(tmp_path / "routing.yaml")}
    config.write_text(
        json.dumps({"engine": {"model": "models/demo"}, "backends": backends, "routing": routing})
    )
    with gateway(tmp_path, config=config) as live, httpx.Client(base_url=live.url, timeout=60) as http:
        client = client_of(live)
        for _ in range(6):
            begun(client, 20, "/v1/chat/completions", model="away", messages=hi)
            begun(client, 20, "/v1/embeddings", model="away", input="hi")
        until, refused = time.monotonic() + 60, 0
        while refused < 12:  # the rate is judged from ten requests
            ready = http.get("/ready")
            assert (ready.status_code, ready.json()["checks"]["error_rate_ok"]) == (200, True)
            assert time.monotonic() < until, refused
            time.sleep(0.2)
            refused = int(live.metric("sluice_batch_lines_total"))
        assert http.get("/ready").status_code == 200


def test_a_killed_gateways_batch_goes_on_and_each_line_is_billed_once(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "What should I read next?"}]
    with gateway(tmp_path) as live:
        client = client_of(live)
        batch_id = begun(client, LINES, "/v1/chat/completions", messages=messages, max_tokens=16)
        until = time.monotonic() + 60
        while not 3 <= (counts := client.batches.retrieve(batch_id).request_counts).completed < LINES:
            assert time.monotonic() < until, counts
        live.process.kill()
        live.process.wait()
    with gateway(tmp_path) as live:
        batch = ended(client_of(live), batch_id)
        found = outputs(client_of(live), batch)
        usage = sum(one["usage"]["total_tokens"] for one in found.values())
    assert (batch.status, batch.request_counts.completed, len(found)) == ("completed", LINES, LINES)
    assert batch.usage.total_tokens == usage
    assert rows_of(tmp_path) == {f"gen_{batch_id.removeprefix('batch_')}_{n}": 1 for n in range(1, LINES + 1)}


def rows_of(folder: Path) -> Counter[str]:
    import sqlite3

    with sqlite3.connect(folder / "ledger.db") as ledger:
        return Counter(row[0] for row in ledger.execute("SELECT generation_id FROM generations"))
