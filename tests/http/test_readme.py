"""The README's requests work as they stand, with keys on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.testing import ADMIN_KEY, fake_services, serving
from tests import fork_server

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
ASKING = README[README.index("## Ask it something") :]


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", ASKING, re.S)
    assert found is not None
    return found[1]


@pytest.mark.slow
def test_the_readmes_requests_are_answered_while_keys_are_on() -> None:
    env = {**os.environ, "SLUICE_ADMIN_KEY": ADMIN_KEY}
    with serving(fake_services()) as url:
        address = url.removeprefix("http://")
        curl = block("sh").replace("localhost:8000", address)
        asked = subprocess.run(["sh", "-ec", curl], env=env, capture_output=True, text=True, timeout=60)
        script = block("python").replace("127.0.0.1:8000", address)
        written = fork_server.run([sys.executable, "-c", script], env=env, timeout=60)
    assert '"delta":"Hello"' in asked.stdout and '"type":"done"' in asked.stdout, asked.stdout
    assert written.stdout == "Hello, world", written.stderr
