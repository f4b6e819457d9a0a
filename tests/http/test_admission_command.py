"""`sluice admission show` against a gateway."""

from __future__ import annotations

from collections.abc import Mapping

from typer.testing import CliRunner

from gateway.testing import ADMIN_KEY, CALLER_KEY, fake_services, serving
from ops.cli.main import app
from tests.http.fakes import FakeAdmission

DECISION = {
    "at": "2026-11-20T10:00:00.000+00:00",
    "backend": "local",
    "tenant": "acme",
    "class": "normal",
    "estimated_wait_ms": 2100.0,
    "queue_depth": 9,
    "in_flight": 4,
    "kv_usage": 0.5,
}
SHOWN: Mapping[str, object] = {
    "backends": {
        "local": {
            "queue": {
                "requests": 3,
                "tokens": 900,
                "bytes": 57600,
                "held_by": "slots",
                "classes": {"high": 1, "normal": 2, "low": 0},
                "tenants": [{"tenant": "acme", "class": "normal", "requests": 2}],
            },
            "in_flight": {
                "requests": 4,
                "sequences": 4,
                "limit": 8,
                "engine_limit": 16,
                "pace_of_target": 0.97,
            },
            "memory": {"used": 0.5, "forecast": 0.75},
            "ladder": {"rung": 1},
            "circuit": {"state": "closed"},
            "rates": {"held_ms": 1250.0},
        }
    },
    "limits": {"default": {}, "routes": {}},
    "decisions": [
        {**DECISION, "decision": "refused", "reason": "queue_full", "retry_after_ms": 1.0, "queued": False},
        {
            **DECISION,
            "decision": "refused",
            "reason": "wait_exceeded",
            "retry_after_ms": 2345.0,
            "queued": True,
        },
        {**DECISION, "decision": "admitted", "waited_ms": 12.0, "shrunk": True},
    ],
}


class Busy:
    def show(self) -> Mapping[str, object]:
        return SHOWN


def run(*words: str, busy: bool = True) -> tuple[int, str]:
    admission = Busy() if busy else FakeAdmission()
    with serving(fake_services(admission=admission)) as url:
        done = CliRunner().invoke(
            app,
            ["admission", "show", "--url", url, *words],
            env={"COLUMNS": "160", "SLUICE_ADMIN_KEY": ADMIN_KEY},
        )
    return done.exit_code, done.output


def test_a_busy_gateway_is_shown_as_tables() -> None:
    code, text = run()
    assert code == 0
    for part in (
        "3 (high 1 normal 2)",
        "slots",
        "4 of 8 (engine 16)",
        "97% of target",
        "75%",
        "acme",
        "queue_full  ",
        "wait_exceeded, in queue",
        "2,345",
        "admitted, shortened",
    ):
        assert part in text, part


def test_the_gateways_own_answer_is_printed_for_machines() -> None:
    code, text = run("--json")
    assert code == 0 and '"held_by": "slots"' in text


def test_an_idle_gateway_says_so() -> None:
    assert run(busy=False) == (0, "No backend has had a request yet.\n")


def test_a_callers_key_is_refused_in_one_line() -> None:
    code, text = run("--key", CALLER_KEY)
    assert code == 1 and "403 forbidden" in text and len(text.splitlines()) == 1
