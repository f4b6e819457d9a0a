"""An evaluation report is accepted only if its signature matches its content and the shared secret."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.contracts.evaluation_report import evaluation_key, is_signed, sign

KEY = b"shared"
REPORT: dict[str, Any] = {
    "passed": True,
    "candidate_sha256": "a" * 64,
    "prompts": {"file": "日本語.jsonl", "sha256": "b" * 64, "count": 3},
    "metrics": [{"metric": "loss", "worse_by": 1e-07, "allowed": None}],
}


def test_a_signed_report_is_accepted_after_a_json_round_trip() -> None:
    assert is_signed(json.loads(json.dumps(sign(REPORT, KEY))), KEY)


@pytest.mark.parametrize(
    "changed",
    [
        {"passed": False},
        {"candidate_sha256": "c" * 64},
        {"prompts": {**REPORT["prompts"], "sha256": "d" * 64}},
        {"more": 1},
        {"signature": "e" * 64},
        {"signature": "é"},
        {"signature": None},
    ],
)
def test_a_changed_report_is_refused(changed: dict[str, Any]) -> None:
    assert not is_signed({**sign(REPORT, KEY), **changed}, KEY)


def test_a_report_of_another_secret_without_a_prompt_digest_or_unsigned_is_refused() -> None:
    assert not is_signed(sign(REPORT, b"other"), KEY)
    assert not is_signed(sign({**REPORT, "prompts": "many"}, KEY), KEY)
    assert not is_signed(REPORT, KEY)


def test_the_secret_is_the_evaluation_key_or_else_the_admin_key() -> None:
    assert evaluation_key({"SLUICE_EVALUATION_KEY": "e", "SLUICE_ADMIN_KEY": "a"}) == b"e"
    assert evaluation_key({"SLUICE_EVALUATION_KEY": "", "SLUICE_ADMIN_KEY": "a"}) == b"a"
    assert evaluation_key({}) == b""
