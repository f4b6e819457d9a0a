"""Each gateway behind a real HAProxy is restarted under load, and no request fails."""

from __future__ import annotations

import asyncio
import os
import shutil

import pytest

from benchmarks.rolling_restart import measure
from benchmarks.rolling_site import Plan, site

pytestmark = pytest.mark.slow

needs_haproxy = pytest.mark.skipif(
    shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin") is None,
    reason="haproxy is not installed: scripts/test-env does it",
)


@needs_haproxy
def test_two_gateways_restarted_in_turn_fail_no_request_and_break_no_stream() -> None:
    plan = Plan(gateways=2, rate=6.0, step_ms=5.0, lame_duck_s=4.0, steady_s=0.5)
    with site(plan) as here:
        result = asyncio.run(measure(here, lambda what, back: None))
    assert result.failures == {}, result
    assert (result.failed, result.broken, result.ledger_missing, result.ledger_doubled) == (0, 0, 0, 0)
    assert result.good
    assert len(result.restarts) == 2
    assert result.rolling.answers > 20 and result.streams > 10, "there was load while they restarted"
