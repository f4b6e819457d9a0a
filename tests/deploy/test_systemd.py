"""The systemd unit: systemd's own checks of it, and its settings for the drain and the confinement."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.config.settings import Settings
from ops.cli.main import app

UNIT = Path(__file__).resolve().parents[2] / "deploy" / "systemd" / "sluice.service"
# In tenths; lower is better: what `systemd-analyze security` calls OK ends at 4 of 10; the unit has 2.0.
MAX_EXPOSURE = 25

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here"
)


@pytest.fixture(scope="module")
def service() -> configparser.SectionProxy:
    unit = configparser.RawConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(UNIT.read_text(encoding="utf-8"))
    return unit["Service"]


def analyzed(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *words], capture_output=True, text=True, timeout=30)


@needs_systemd
def test_systemd_finds_nothing_to_complain_of(tmp_path: Path) -> None:
    there = tmp_path / UNIT.name
    there.write_text(UNIT.read_text(encoding="utf-8").replace("/opt/sluice/bin/sluice", "/bin/true"))
    found = analyzed("verify", "--man=no", str(there))
    assert (found.returncode, found.stderr) == (0, "")


@needs_systemd
def test_systemd_calls_it_well_confined() -> None:
    found = analyzed("security", "--offline=true", f"--threshold={MAX_EXPOSURE}", str(UNIT))
    assert found.returncode == 0, found.stdout[-300:]


def test_a_drain_has_the_time_it_needs_and_reaches_the_gateway_alone(
    service: configparser.SectionProxy,
) -> None:
    drain_s = Settings().server.drain_seconds
    assert int(service["TimeoutStopSec"]) > drain_s + 30, "the engine's stop and the last rows come after it"
    assert service["KillSignal"] == "SIGTERM"
    assert service["KillMode"] == "mixed", "an engine that is told by itself would end under its answers"


def test_the_service_is_not_root_and_cannot_gain_privileges(service: configparser.SectionProxy) -> None:
    assert service["User"] not in ("", "root")
    assert (service["NoNewPrivileges"], service["ProtectSystem"]) == ("yes", "strict")
    assert service["CapabilityBoundingSet"] == ""


def test_no_secret_stands_in_the_unit(service: configparser.SectionProxy) -> None:
    assert "KEY" not in service["Environment"]
    assert service["EnvironmentFile"].startswith("-/etc/sluice/")


def test_its_command_is_one_that_the_program_knows(service: configparser.SectionProxy) -> None:
    program, *words = shlex.split(service["ExecStart"])
    assert Path(program).name == "sluice"
    assert CliRunner().invoke(app, [words[0], "--help"]).exit_code == 0
    assert "--config" in words
