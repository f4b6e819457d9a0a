"""A gateway that is killed repeatedly, on a PostgreSQL that crashes; benchmarks/ledger_kill.py does more."""

from __future__ import annotations

from pathlib import Path

from benchmarks.ledger_kill import run
from benchmarks.ledger_postgres import postgres


async def test_a_gateway_killed_again_and_again_bills_every_answer_once_through_database_crashes(
    tmp_path: Path,
) -> None:
    with postgres() as server:
        result = await run(
            server.url,
            tmp_path,
            server=server,
            requests=150,
            kill_every_s=1.0,
            at_once=16,
            seed=1,
            outage_s=0.5,
        )
    assert result.good, result
    assert (result.answered, result.outages) == (150, 2) and result.kills >= 2
    assert result.callers_tokens == result.ledger_tokens and result.callers_tokens[0] > 150 * 40
