"""Prompts on a real gateway: canonical prefixes in the engine's cache, versions, previews, the command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests import fork_server
from tests.integration.live import ADMIN_KEY, ROOT, LiveGateway, environment, gateway

SYSTEM = (
    "You serve the readers of a manga shop. Answer in one sentence. Never promise what is not in stock. "
    "Name the volume when you name a series. Say so when you do not know."
)


def ask(live: LiveGateway, *system: str, **fields: object) -> dict[str, object]:
    messages = [{"role": "system", "content": text} for text in system]
    body = {
        "messages": [*messages, {"role": "user", "content": "Who wrote Berserk?"}],
        "sampling": {"max_tokens": 1, "temperature": 0},
        **fields,
    }
    answer = httpx.post(f"{live.url}/v1/generate", json=body, headers=live.headers, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, object] = answer.json()
    return found


def cached(answer: dict[str, object]) -> int:
    usage = answer["usage"]
    assert isinstance(usage, dict)
    return int(usage["cached_tokens"])


def sluice(live: LiveGateway, *words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    env = {**environment({}), "SLUICE_URL": live.url, "COLUMNS": "200"}
    return fork_server.run(
        [sys.executable, "-m", "ops.cli", *words],
        cwd=ROOT, env=env, input=stdin, timeout=60,
    )  # fmt: skip


def preview(live: LiveGateway, body: object) -> dict[str, object]:
    answer = httpx.post(f"{live.url}/admin/budget/preview", json=body, headers=live.headers, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, object] = answer.json()
    return found


def logged(live: LiveGateway, count: int) -> list[dict[str, object]]:
    """The log lines of the last ``count`` requests with a time in a system message; waits for the lines."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        lines = [json.loads(line) for line in live.log.read_text().splitlines() if line.startswith("{")]
        found = [line for line in lines if line.get("volatile") == ["time"]]
        if len(found) >= count:
            return found[-count:]
        time.sleep(0.05)
    raise AssertionError(live.log.read_text())


def test_a_timestamp_in_the_system_message_does_not_cost_the_cached_prefix(live: LiveGateway) -> None:
    first = ask(live, f"Today is 2026-11-20, 10:00:01.\n{SYSTEM}")
    second = ask(live, f"Today is 2026-11-21, 11:11:11.\n{SYSTEM}")
    budget = second["budget"]
    assert isinstance(budget, dict)
    assert cached(second) >= budget["system"] - budget["system"] % 16 > cached(first)
    assert any("(date, time) was moved" in str(warning) for warning in second["warnings"])  # type: ignore[attr-defined]


def test_texts_of_equal_meaning_share_the_cached_prefix(live: LiveGateway) -> None:
    ask(live, f"Café rules.\n{SYSTEM}")
    again = ask(live, f"  Cafe\u0301 rules.  \r\n{SYSTEM}\n\n")
    budget = again["budget"]
    assert isinstance(budget, dict)
    assert cached(again) >= budget["system"] - budget["system"] % 16


def test_a_changed_context_keeps_the_prefix_and_its_fingerprint(live: LiveGateway) -> None:
    body = {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "hi"}]}
    one, two = (preview(live, {**body, "context": {"time": at}})["prefix"] for at in ("10:00", "11:00"))
    assert one == two


def test_openais_contract_sends_what_was_written_and_warns(live: LiveGateway) -> None:
    messages = [{"role": "system", "content": "Today is 2026-11-20."}, {"role": "user", "content": "hi"}]
    body = {"model": "demo", "messages": messages, "max_tokens": 1}
    answer = httpx.post(f"{live.url}/v1/chat/completions", json=body, headers=live.headers, timeout=60).json()
    asked = {"model": "demo", "messages": messages}
    counted = httpx.post(f"{live.url}/tokenize", json=asked, headers=live.headers, timeout=60).json()
    assert answer["usage"]["prompt_tokens"] == counted["count"]
    assert "(date) shortens" in answer["sluice"]["warnings"][0]
    shown = preview(live, {"openai": {"model": "demo", "messages": messages}})
    assert "2026-11-20" in shown["prompt"]["before_boundary"]  # type: ignore[index]


def test_a_preview_counts_what_the_request_then_uses_and_bills_nothing(live: LiveGateway) -> None:
    body = {
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is it?"}],
        "retrieval_chunks": [{"chunk_id": "m1", "source_type": "catalog", "text": "Berserk, 42 volumes."}],
        "context": {"locale": "ja"},
        "sampling": {"max_tokens": 1},
    }
    before = live.metric("sluice_requests_total")
    shown = preview(live, body)
    assert live.metric("sluice_requests_total") == before
    answer = httpx.post(f"{live.url}/v1/generate", json=body, headers=live.headers, timeout=60).json()
    assert shown["input_tokens"] == answer["usage"]["input_tokens"]
    assert {name: one["tokens"] for name, one in shown["sections"].items()} == {  # type: ignore[attr-defined]
        name: answer["budget"].get(name, 0)
        for name in ("tools", "system", "retrieval", "recent_turns", "older_summary")
    }


def test_metrics_and_log_tell_fingerprint_expectation_and_volatile_kinds(live: LiveGateway) -> None:
    text = f"{SYSTEM} Be quick."
    for at in ("10:00:01", "10:00:02"):
        ask(live, text, f"The time is {at}.")
    assert live.metric("sluice_prompt_volatile_total") > 0
    prefix = live.metric("sluice_prompt_prefix_tokens_total")
    expected = live.metric("sluice_prompt_expected_cached_tokens_total")
    found = live.metric("sluice_prompt_cached_tokens_total")
    assert prefix > expected > 0 and found >= expected
    metrics = httpx.get(f"{live.url}/metrics", timeout=60).text
    ratio = 'sluice_prompt_cached_ratio{against="expected",prompt_version="chat-manga-2.1"}'
    [value] = [float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(ratio)]
    assert value > 0.99
    [one, two] = logged(live, 2)
    assert one["volatile_action"] == "moved"
    assert one["prefix_fingerprint"] == two["prefix_fingerprint"]
    assert two["prefix_cached_tokens"] == two["prefix_expected_tokens"] == two["prefix_tokens"] > 0
    assert "10:00:0" not in live.log.read_text()


def test_the_command_lists_shows_and_renders(live: LiveGateway, tmp_path: Path) -> None:
    listed = sluice(live, "prompts", "list")
    assert listed.returncode == 0 and "chat-manga-2.1" in listed.stdout
    as_json = json.loads(sluice(live, "--json", "prompts", "list").stdout)
    [version] = [one for one in as_json["prompts"] if one["id"] == "chat-manga-2.1"]
    assert version["published_at"] and version["routes"] == ["self_hosted_generation"]
    shown = sluice(live, "prompts", "show", "chat-manga-2.1")
    assert version["sha256"] in shown.stdout and "You are a manga shopping assistant." in shown.stdout
    request = tmp_path / "request.json"
    request.write_text(
        json.dumps({
            "messages": [
                {"role": "system", "content": "Be brief. Request req_9f1b."},
                {"role": "user", "content": "Who wrote Berserk?"},
            ]
        })
    )  # fmt: skip
    rendered = sluice(live, "prompts", "render", str(request)).stdout
    above, below = re.split(r"boundary: .*", rendered)
    assert "volatile id 'req_9f1b' in system message 0: moved" in above
    assert "Be brief." in above and "Who wrote Berserk?" in below and "req_9f1b" in below
    chat = '{"model": "demo", "messages": [{"role": "user", "content": "hi"}]}'
    piped = sluice(live, "prompts", "--json", "render", "-", "--openai", stdin=chat)
    assert json.loads(piped.stdout)["prompt_version"] is None


def test_a_prompt_is_shown_in_the_lines_in_which_it_is_sent(live: LiveGateway) -> None:
    shown = sluice(live, "prompts", "show", "chat-manga-2.1").stdout
    assert "\nYou are a manga shopping assistant.\n" in shown
    request = json.dumps({"messages": [{"role": "user", "content": "Who?\nAnd \u001b[2J when?"}]})
    rendered = sluice(live, "prompts", "render", "-", stdin=request).stdout
    assert "\nYou are a manga shopping assistant.\n" in rendered
    assert "Who?\nAnd \\u001b[2J when?" in rendered


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prompts", "show", "nothing at all"], "404 unknown_prompt_version"),
        (["prompts", "list", "--key", "wrong"], "401 invalid_key"),
        (["prompts", "list", "--url", "http://127.0.0.1:1"], "is the gateway running there?"),
        (["prompts", "list", "--url", "nonsense"], "allowed: http://HOST:PORT"),
        (["prompts", "render", "/no/such/file"], "/no/such/file"),
    ],
)
def test_the_command_says_what_went_wrong_in_one_line(
    live: LiveGateway, words: list[str], message: str
) -> None:
    done = sluice(live, *words)
    assert done.returncode == 1
    assert message in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_published_version_that_was_changed_stops_the_start(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    shipped = (ROOT / "prompts" / "chat-manga-2.1.yaml").read_text()
    file = prompts / "chat-manga-2.1.yaml"
    file.write_text(shipped)
    env = {"SLUICE_PROMPTS__FOLDER": str(prompts)}
    with gateway(tmp_path, **env) as live:
        httpx.get(f"{live.url}/admin/prompts", headers={"Authorization": f"Bearer {ADMIN_KEY}"}, timeout=60)
    file.write_text(shipped.replace("manga shopping assistant", "grumpy clerk"))
    settings = {
        "SLUICE_STATE__URL": f"sqlite:///{tmp_path}/state.db",
        "SLUICE_LEDGER__URL": f"sqlite+aiosqlite:///{tmp_path}/ledger.db",
        **env,
    }
    done = fork_server.run(
        [sys.executable, "-m", "ops.cli", "serve", "--config", "sluice.yaml"],
        cwd=ROOT, env=environment(settings), timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if "published" in line and line.startswith("sluice:")]
    assert len(lines) == 1 and len(re.findall(r"\b[0-9a-f]{64}\b", lines[0])) == 2
    assert "Traceback" not in done.stderr and os.fspath(file) in lines[0]
