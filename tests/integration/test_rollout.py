"""`sluice rollout check` against a real gateway."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests import fork_server
from tests.integration.live import ADMIN_KEY, ROOT, LiveGateway


def check(live: LiveGateway, *words: str, key: str = ADMIN_KEY) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ops.cli", "rollout", "check", "--url", live.url, "--json", *words]
    env = {**os.environ, "SLUICE_ADMIN_KEY": key}
    return fork_server.run(command, env=env, cwd=ROOT, timeout=120)


def test_the_rollout_checks_run_on_a_live_gateway(live: LiveGateway) -> None:
    done = check(live, "--grace", "10", "--config", str(ROOT / "sluice.yaml"))
    report = json.loads(done.stdout)
    verdicts = {one["check"]: one["verdict"] for one in report["checks"]}
    assert verdicts["ready"] == verdicts["every backend generates"] == verdicts["keys"] == "ok", report
    assert (
        verdicts["ready soon after start"] == verdicts["revision in force"] == verdicts["ledger"] == "ok"
    ), report
    assert verdicts["time to drain"] == "wrong", "ten seconds are less than the drain"
    assert verdicts["soak test"] == "manual"
    assert (done.returncode, report["ok"]) == (1, False)


def test_a_wrong_key_and_a_wrong_replay_file_are_refused_at_once(live: LiveGateway, tmp_path: Path) -> None:
    refused = check(live, key="wrong")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "invalid_key" in refused.stderr or "401" in refused.stderr
    no_file = check(live, "--replay", str(ROOT / "README.md"))
    assert no_file.returncode == 2
    assert "README.md: it is no file of `sluice replay --output`" in no_file.stderr
    part = tmp_path / "part.json"
    part.write_text('{"requests": {"sent": 1}, "goodput": {"within_slo": 1}, "wall_s": 1}')
    no_counts = check(live, "--replay", str(part))
    assert (no_counts.returncode, no_counts.stdout) == (2, "")
    assert "part.json: it is no file of `sluice replay --output`" in no_counts.stderr
