"""Vercel's AI SDK, from Node: a loop of three turns with tools, and answers of a schema."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.shop_worker import ANSWER, MODEL, RECORD, RESULTS
from tests.integration.live import ADMIN_KEY, LiveGateway

FOLDER = Path(__file__).parent / "node"
KINDS = ("openai", "responses", "compatible")


@pytest.mark.skipif(
    shutil.which("node") is None or not (FOLDER / "node_modules").is_dir(),
    reason="npm install --prefix tests/clients/node",
)
def test_loops_of_three_turns_and_an_answer_of_a_schema(shop: LiveGateway) -> None:
    command = ["node", "shop.mjs", shop.url, ADMIN_KEY, MODEL, json.dumps(dict(RESULTS))]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for kind in KINDS:
        for form in ("whole", "streamed"):
            loop = found[f"{kind} {form}"]
            assert sorted(loop["called"]) == sorted(RESULTS) and loop["called"][-1] == "ship"
            assert (loop["text"], loop["reason"]) == (ANSWER, "stop") and loop["outputTokens"] > 0
        assert found[f"{kind} object"] == RECORD
