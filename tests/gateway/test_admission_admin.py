"""What the operator API shows of admission."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from msgspec import structs

from admission.controller import AdmissionController
from admission.errors import Refused
from admission.values import AdmissionLimits
from gateway.admin.admission import KEPT_ADMITTED, KEPT_REFUSED, AdmissionAdmin
from gateway.routing.check import KnownNames
from gateway.routing.revision import Revision, make_revision
from tests.admission.gate_rig import IDLE, ask

LIMITS = AdmissionLimits(max_input_tokens=3_600)
ROUTE = {
    "backends": [{"name": "local", "weight": 100}],
    "admission": {"max_queue": 7, "max_wait_ms": 500},
    "slo": {"tpot_ms": 50},
}


class AdmissionRig:
    """An AdmissionAdmin, and a controller whose backend runs one request at a time."""

    def __init__(self) -> None:
        known = KnownNames(["local"], [], [], LIMITS)
        plain = {"backends": [{"name": "local", "weight": 100}]}
        self.revision: Revision = make_revision(1, {"routes": {"strict": ROUTE, "plain": plain}}, known)
        self.controller = AdmissionController(
            LIMITS,
            load=lambda _: structs.replace(IDLE, kv_usage=0.25, max_running=1),
            clock=lambda: asyncio.get_running_loop().time(),
            emit=lambda event: self.admin.observe(event),
            random=random.Random(1),
        )
        self.admin = AdmissionAdmin(
            LIMITS,
            self.controller,
            revision=lambda: self.revision,
            clock=lambda: asyncio.get_running_loop().time(),
            unix_time=lambda: 1_800_000_000.0,
        )


async def test_a_backend_without_any_request_is_not_shown() -> None:
    rig = AdmissionRig()
    assert rig.admin.show()["backends"] == {}
    assert list(rig.admin.figures()) == []


async def test_waiting_requests_are_shown_by_class_and_tenant_with_what_they_wait_for() -> None:
    rig = AdmissionRig()
    async with asyncio.TaskGroup() as group, rig.controller.admit(ask()):

        async def wait(tenant: str, priority: int) -> None:
            async with rig.controller.admit(ask(tenant=tenant, priority=priority)):
                await asyncio.sleep(0)

        for tenant, priority in (("a", 0), ("a", 0), ("b", 1)):
            group.create_task(wait(tenant, priority))
        await asyncio.sleep(0.01)
        shown = json.loads(json.dumps(rig.admin.show()))["backends"]["local"]
        [figures] = rig.admin.figures()
    assert shown["queue"]["requests"] == 3
    assert shown["queue"]["held_by"] == "slots"
    assert shown["queue"]["classes"] == {"high": 1, "normal": 2, "low": 0}
    assert shown["queue"]["tenants"] == [
        {"tenant": "b", "class": "high", "requests": 1},
        {"tenant": "a", "class": "normal", "requests": 2},
    ]
    assert (shown["in_flight"]["sequences"], shown["in_flight"]["limit"]) == (1, 1)
    assert shown["memory"]["used"] == 0.25 < shown["memory"]["forecast"]
    assert shown["circuit"]["state"] == "closed"
    assert (figures.name, figures.queued, figures.in_flight) == (
        "local",
        {"high": 1, "normal": 2, "low": 0},
        1,
    )


async def test_limits_are_shown_whole_and_of_routes_what_differs() -> None:
    limits = json.loads(json.dumps(AdmissionRig().admin.show()))["limits"]
    assert limits["default"]["max_queue"] == 1000
    assert limits["routes"] == {
        "strict": {"max_queue": 7, "max_wait_s": 0.5, "tpot_slo_s": 0.05, "ttft_slo_s": 0.2}
    }


async def test_a_bounded_number_of_last_decisions_is_kept_refusals_separately() -> None:
    rig = AdmissionRig()
    with pytest.raises(Refused):
        async with rig.controller.admit(ask(input_tokens=9_999)):
            raise AssertionError("it was let through")
    for _ in range(KEPT_ADMITTED + 5):
        async with rig.controller.admit(ask()):
            await asyncio.sleep(0)
    decisions = rig.admin.show()["decisions"]
    assert isinstance(decisions, list) and len(decisions) == KEPT_ADMITTED + 1
    [refused] = [one for one in decisions if one["decision"] == "refused"]
    assert refused["reason"] == "token_budget_exceeded" and refused["retry_after_ms"] > 0
    assert refused["at"].startswith("2027-01-15T08:00:00")
    for _ in range(KEPT_REFUSED + 5):
        with pytest.raises(Refused):
            async with rig.controller.admit(ask(input_tokens=9_999)):
                raise AssertionError("it was let through")
    shown = rig.admin.show()["decisions"]
    assert isinstance(shown, list) and len(shown) == KEPT_ADMITTED + KEPT_REFUSED


async def test_the_rungs_in_force_are_shown_for_each_route_with_a_ladder_of_its_own() -> None:
    rig = AdmissionRig()
    backends = [{"name": "local", "weight": 100}]
    steep = {"backends": backends, "admission": {"ladder": [{"depth": 1, "max_tokens": 9}]}}
    routes = {"plain": {"backends": backends}, "steep": steep}
    rig.revision = make_revision(2, {"routes": routes}, KnownNames(["local"], [], [], LIMITS))
    async with asyncio.TaskGroup() as group, rig.controller.admit(ask()):

        async def wait() -> None:
            async with rig.controller.admit(ask()):
                await asyncio.sleep(0)

        for _ in range(2):
            group.create_task(wait())
        await asyncio.sleep(0.01)
        [figures] = rig.admin.figures()
        shown = json.loads(json.dumps(rig.admin.show()))["backends"]["local"]["ladder"]
    assert figures.rungs == {"": 0, "steep": 1}
    assert (shown["rung"], shown["routes"]["steep"]["rung"]) == (0, 1)
    assert shown["routes"]["steep"]["max_tokens"] == 9
    [figures] = rig.admin.figures()
    assert figures.rungs == {"": 0, "steep": 0}, "nobody waits any more, though nobody has asked since"
