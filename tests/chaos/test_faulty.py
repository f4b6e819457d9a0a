"""Injected faults: where and how often they come, and that nothing else changes."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgeting.values import Message, Role
from gateway.admin.chaos import ChaosAdmin
from gateway.backends.faulty import FaultPlan, FaultyBackend
from gateway.backends.port import Absence, Backend, Work, restarting
from gateway.config.chaos import ChaosSection, FaultRule
from gateway.config.errors import ConfigError
from gateway.contracts.events import Delta
from gateway.contracts.values import Sampling
from gateway.state.audit import Audit
from gateway.state.memory import MemoryStateStore, MemoryStreams
from gateway.testing import ADMIN_KEY, CALLER_KEY, fake_services, serving
from gateway.wiring.backends import make_chaos
from resilience.failures import BackendFailure, FailureKind
from tests.scripted import Script, ScriptedBackend

PIECES = ("a", "b", "c", "d")
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}


def rule(kind: str = "cuda_oom", **more: Any) -> FaultRule:
    return FaultRule.model_validate({"backend": "local", "kind": kind, **more})


def plan_of(*rules: FaultRule, seed: int = 0) -> FaultPlan:
    plan = FaultPlan({"local", "other"}, random.Random(seed))
    plan.replace(rules)
    return plan


async def texts_of(backend: Backend) -> tuple[list[str], BackendFailure | None]:
    texts: list[str] = []

    async def out(delta: Delta) -> None:
        texts.append(delta.text)

    try:
        await backend.generate(Work("gen", (1,), (Message(Role.USER, "x"),), Sampling(max_tokens=9)), out)
    except BackendFailure as failure:
        return texts, failure
    return texts, None


def test_a_rule_for_a_pool_holds_for_each_of_its_models() -> None:
    plan = plan_of(rule(every=2))
    assert [plan.next(name) is not None for name in ("local/a", "local/b", "other", "local")] == [
        False, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize("after", range(len(PIECES)))
@pytest.mark.parametrize("kind", list(FailureKind))
async def test_a_failure_comes_after_the_given_tokens_and_ends_the_backends_work(
    kind: FailureKind, after: int
) -> None:
    inner = ScriptedBackend(scripts=[Script(PIECES)])
    texts, failure = await texts_of(FaultyBackend(inner, plan_of(rule(kind.value, after_tokens=after))))
    assert texts == list(PIECES[:after])
    assert failure is not None and failure.kind is kind
    assert inner.active == 0


async def test_an_answer_that_is_too_short_for_the_fault_stays_whole() -> None:
    plan = plan_of(rule(after_tokens=len(PIECES)))
    texts, failure = await texts_of(FaultyBackend(ScriptedBackend(scripts=[Script(PIECES)]), plan))
    assert (texts, failure) == (list(PIECES), None) and not plan.injected


@pytest.mark.parametrize("after", [0, 2])
async def test_a_hang_ends_with_its_caller_and_leaves_nothing(after: int) -> None:
    inner = ScriptedBackend(scripts=[Script(PIECES)])
    texts: list[str] = []

    async def out(delta: Delta) -> None:
        texts.append(delta.text)

    before = asyncio.all_tasks()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.05):
            await FaultyBackend(inner, plan_of(rule("hang", after_tokens=after))).generate(
                Work("gen", (1,), (), Sampling(max_tokens=9)), out
            )
    assert texts == list(PIECES[:after])
    assert inner.active == 0 and asyncio.all_tasks() == before


async def test_slow_tokens_are_late_and_all_there() -> None:
    plan = plan_of(rule("slow", after_tokens=2, delay_ms=20))
    began = asyncio.get_running_loop().time()
    texts, failure = await texts_of(FaultyBackend(ScriptedBackend(scripts=[Script(PIECES)]), plan))
    assert (texts, failure) == (list(PIECES), None)
    assert asyncio.get_running_loop().time() - began >= 0.04
    assert plan.injected == {("local", "slow"): 1}


async def test_a_real_failure_within_is_passed_on_as_it_is() -> None:
    real = BackendFailure(FailureKind.THROTTLED, "real")
    inner = ScriptedBackend(scripts=[Script(("a",), failure=real)])
    _, failure = await texts_of(FaultyBackend(inner, plan_of(rule(after_tokens=3))))
    assert failure is real


async def test_every_third_call_of_this_backend_breaks_and_at_most_twice() -> None:
    plan = plan_of(rule(every=3, times=2), rule(backend="other"))
    backend = FaultyBackend(ScriptedBackend(scripts=[Script(PIECES)]), plan)
    broken = [(await texts_of(backend))[1] is not None for _ in range(12)]
    assert [number for number, one in enumerate(broken, start=1) if one] == [3, 6]


@given(
    counts=st.lists(st.sampled_from(["every", "probability", "times"]), max_size=4),
    seed=st.integers(0, 100),
    calls=st.integers(0, 200),
)
def test_a_plan_is_the_same_for_the_same_seed_and_never_over_its_times(
    counts: Sequence[str], seed: int, calls: int
) -> None:
    values: dict[str, Any] = {"every": 3, "probability": 0.3, "times": 5}
    rules = [rule(**{name: values[name]}) for name in counts]

    def run() -> list[bool]:
        plan = plan_of(*rules, seed=seed)
        return [plan.next("local") is not None for _ in range(calls)]

    assert run() == run()
    if list(counts) == ["times"]:
        assert sum(run()) == min(calls, 5)


def test_a_restarting_backend_still_restarts_when_it_is_wrapped() -> None:
    class RestartingBackend(ScriptedBackend):
        ready_in_s = 1.5
        absence = Absence("it restarts")

        async def wait_ready(self, timeout_s: float) -> bool:
            return timeout_s > 1.5

    wrapped = FaultyBackend(RestartingBackend(), plan_of())
    engine = restarting(wrapped)
    assert engine is not None and engine.ready_in_s == 1.5 and asyncio.run(engine.wait_ready(2.0))
    assert restarting(FaultyBackend(ScriptedBackend(), plan_of())) is None


def test_backends_are_wrapped_only_when_chaos_is_enabled() -> None:
    backend = ScriptedBackend()
    wrap, chaos = make_chaos(ChaosSection(faults=(rule(),)), ["local"])
    assert wrap(backend) is backend and chaos is None
    wrap, chaos = make_chaos(ChaosSection(enabled=True), ["local"])
    assert isinstance(wrap(backend), FaultyBackend) and chaos is not None


def test_a_rule_for_a_backend_that_is_not_there_stops_the_start() -> None:
    with pytest.raises(ConfigError, match=r"chaos\.faults\.0\.backend: .*'local'.*allowed: gpu"):
        make_chaos(ChaosSection(enabled=True, faults=(rule(),)), ["gpu"])


def test_a_rule_is_chosen_by_count_or_by_chance() -> None:
    with pytest.raises(ValueError, match="every or probability, not both"):
        rule(every=2, probability=0.5)


def test_operators_change_the_faults_at_run_time_and_the_path_is_only_there_when_enabled() -> None:
    plan = plan_of()
    body = {"faults": [{"backend": "local", "kind": "nan_output", "after_tokens": 4, "every": 2}]}
    streams = MemoryStreams()
    audit = Audit(MemoryStateStore(streams, unix_time=lambda: 1.0), unix_time=lambda: 1.0)
    services = fake_services(chaos=ChaosAdmin(plan, audit))
    with serving(services) as url, httpx.Client(base_url=url, timeout=60) as client:
        response = client.post("/admin/chaos", json=body, headers=ADMIN)
        assert (response.status_code, response.json()["faults"][0]["kind"]) == (200, "nan_output")
        assert client.get("/admin/chaos", headers=ADMIN).json()["faults"] == response.json()["faults"]
        wrong = client.post(
            "/admin/chaos", json={"faults": [{"backend": "gone", "kind": "hang"}]}, headers=ADMIN
        )
        assert wrong.json()["error"]["param"] == "faults.0.backend"
        unknown = client.post(
            "/admin/chaos", json={"faults": [{"backend": "local", "kind": "boom"}]}, headers=ADMIN
        )
        assert unknown.status_code == 422
        assert unknown.json()["error"]["param"] == "faults.0.kind"
        assert all(f"'{kind}'" in unknown.json()["error"]["message"] for kind in ("cuda_oom", "slow", "hang"))
        two = {"backend": "local", "kind": "hang", "every": 2, "probability": 0.5}
        both = client.post("/admin/chaos", json={"faults": [two]}, headers=ADMIN)
        assert both.json()["error"]["message"] == (
            "faults.0 is an object; allowed: every or probability, not both; none for every call"
        )
        assert (
            client.get("/admin/chaos", headers={"Authorization": f"Bearer {CALLER_KEY}"}).status_code == 403
        )
        assert client.post("/admin/chaos", json=body).status_code == 401
    assert plan.rules[0].kind == FailureKind.NAN_OUTPUT
    done, refused = (orjson.loads(record.data) for record in streams.records["audit"])
    assert (done["action"], done["target"], done["result"]) == ("chaos.replace", "local: nan_output", "done")
    assert refused["target"] == "gone: hang" and refused["result"].startswith("refused: invalid_request")
    assert done["who"] == refused["who"] != "-", "the key that did it"
    with serving(fake_services()) as url:
        assert httpx.get(f"{url}/admin/chaos", headers=ADMIN, timeout=60).status_code == 404
