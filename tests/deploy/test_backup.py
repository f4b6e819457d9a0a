"""A copy made from a running gateway by the documented commands serves elsewhere with the same state."""

from __future__ import annotations

import json
import sqlite3
import time
from pathlib import Path
from typing import Any

import httpx

from tests.deploy.commands import documented, run_documented
from tests.integration.live import LiveGateway, gateway


def get_json(live: LiveGateway, path: str) -> Any:
    answer = httpx.get(f"{live.url}{path}", headers=live.headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ask(live: LiveGateway, key: str, request_id: str) -> None:
    body = {
        "request_id": request_id,
        "messages": [{"role": "user", "content": "Hi."}],
        "sampling": {"max_tokens": 4},
    }
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.post(f"{live.url}/v1/generate", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text


def usage(live: LiveGateway, requests: int) -> Any:
    """Usage of all tenants, as soon as it has at least ``requests`` requests."""
    deadline = time.monotonic() + 60
    while True:
        rows = get_json(live, "/admin/usage?by=tenant")["rows"]
        if sum(row["requests"] for row in rows) >= requests:
            return rows
        assert time.monotonic() < deadline, rows
        time.sleep(0.1)


def test_a_backup_of_a_running_gateway_serves_the_same_revision_keys_adapters_and_usage(
    tmp_path: Path,
) -> None:
    here, copy, there = tmp_path / "here", tmp_path / "copy", tmp_path / "there"
    here.mkdir()
    (here / "files" / "0a").mkdir(parents=True)
    (here / "files" / "0a" / "file-0a").write_bytes(b"a batch's lines")
    places = {"D": str(here), "B": str(copy)}
    with gateway(here) as live:
        made = httpx.post(
            f"{live.url}/admin/keys",
            json={"tenant": "acme", "role": "caller"},
            headers=live.headers,
            timeout=60,
        ).json()
        config = get_json(live, "/admin/routing")["config"]
        config["routes"]["self_hosted_generation"]["slo"] = {"ttft_ms": 321, "total_ms": 4321}
        changed = httpx.put(
            f"{live.url}/admin/routing",
            json={"config": config, "comment": "before the backup"},
            headers=live.headers,
            timeout=60,
        )
        assert changed.status_code == 200, changed.text
        for number in range(3):
            ask(live, made["key"], f"written-{number}")
        usage(live, 3)
        # The database is locked, so these rows are only in the journal while the copy is made.
        with sqlite3.connect(here / "ledger.db", isolation_level=None) as holding:
            holding.execute("BEGIN IMMEDIATE")
            for number in range(2):
                ask(live, made["key"], f"journal-{number}")
            assert run_documented("backup-sqlite", "sqlite3", **places).split() == ["ok", "ok"]
            with sqlite3.connect(copy / "ledger.db") as taken:
                assert taken.execute("SELECT count(*) FROM generations").fetchone() == (3,)
            holding.execute("ROLLBACK")
        before = {
            "revision": get_json(live, "/admin/routing"),
            "keys": get_json(live, "/admin/keys")["keys"],
            "adapters": get_json(live, "/admin/adapters")["adapters"],
            "usage": usage(live, 5),
        }
    run_documented("restore-sqlite", D=str(there), B=str(copy))
    assert (there / "files" / "0a" / "file-0a").read_bytes() == b"a batch's lines"
    with gateway(there) as live:
        after = {
            "revision": get_json(live, "/admin/routing"),
            "keys": get_json(live, "/admin/keys")["keys"],
            "adapters": get_json(live, "/admin/adapters")["adapters"],
            "usage": usage(live, 5),
        }
        ask(live, made["key"], "after")
    assert (after["revision"]["revision"], after["revision"]["config"]) == (
        before["revision"]["revision"],
        before["revision"]["config"],
    )
    assert [known(key) for key in after["keys"]] == [known(key) for key in before["keys"]]
    assert [(one["id"], one["state"]) for one in after["adapters"]] == [
        (one["id"], one["state"]) for one in before["adapters"]
    ]
    assert after["usage"] == before["usage"], "the journal's rows are in it, each once"


def known(key: dict[str, Any]) -> str:
    """The key as JSON without its last use, which is updated only once a minute."""
    return json.dumps({name: value for name, value in key.items() if name != "last_used_at"}, sort_keys=True)


def test_a_restore_on_the_same_machine_keeps_the_old_folder_and_its_newer_journal(tmp_path: Path) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy"
    journal = data / "ledger.db.journal"
    journal.mkdir(parents=True)
    for name in ("state.db", "ledger.db"):
        with sqlite3.connect(data / name) as database:
            database.execute("CREATE TABLE t (x)")
    (journal / "1.journal").write_bytes(b"early")
    places = {"D": str(data), "B": str(copy)}
    run_documented("backup-sqlite", "sqlite3", **places)
    (journal / "1.journal").write_bytes(b"early and late")
    (data / "state.db-wal").write_bytes(b"newer than the copy")
    (data / "state.db.streams").mkdir()
    run_documented("restore-sqlite", **places)
    assert (journal / "1.journal").read_bytes() == b"early and late"
    assert {one.name for one in data.iterdir()} == {"state.db", "ledger.db", "ledger.db.journal"}
    assert (tmp_path / "data.before" / "state.db-wal").exists()


def test_a_second_restore_keeps_both_old_folders_and_their_journals(tmp_path: Path) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy"
    journal = data / "ledger.db.journal"
    journal.mkdir(parents=True)
    for name in ("state.db", "ledger.db"):
        with sqlite3.connect(data / name) as database:
            database.execute("CREATE TABLE t (x)")
    places = {"D": str(data), "B": str(copy)}
    run_documented("backup-sqlite", "sqlite3", **places)
    (journal / "1.journal").write_bytes(b"before the first")
    run_documented("restore-sqlite", **places)
    (journal / "1.journal").unlink()  # the restored folder may lack it: the first restore was interrupted
    (journal / "2.journal").write_bytes(b"before the second")
    run_documented("restore-sqlite", **places)
    assert {one.name for one in journal.iterdir()} == {"1.journal", "2.journal"}
    assert {one.name for one in data.iterdir()} == {"state.db", "ledger.db", "ledger.db.journal"}
    first, second = sorted(tmp_path.glob("data.before*"))
    assert (first / "ledger.db").exists() and (second / "ledger.db.journal" / "2.journal").exists()


def test_every_block_that_is_marked_as_tested_is_tested() -> None:
    tests = "".join(file.read_text() for file in Path(__file__).parent.glob("test_backup*.py"))
    assert documented() and [name for name in documented() if f'"{name}"' not in tests] == []
