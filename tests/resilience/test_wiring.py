"""Resilience as the gateway wires it: a failure reaches admission, the engine and the metrics."""

from __future__ import annotations

import random
from typing import Any

import pytest

from admission.controller import AdmissionController
from admission.values import AdmissionLimits
from gateway.config.engine import EngineSection
from gateway.config.resilience import ResilienceSection
from gateway.generation.remedies import Remediation
from gateway.generation.retry_loop import AttemptBounds
from gateway.wiring.backends import Engines
from gateway.wiring.engine import EngineParts
from gateway.wiring.generation import make_retries
from observability.collectors import plain
from observability.metrics import Metrics
from resilience.degenerate import Action
from resilience.events import ResilienceEvent
from resilience.failures import BackendFailure, FailureKind
from resilience.retry import Attempt
from resilience.retry_budget import CallBudget

FAR = 1e6


class WiringRig:
    """Admission, metrics and the resilience parts of two backends on one engine."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.restarts: list[tuple[str, str]] = []
        self.events: list[ResilienceEvent] = []
        self.metrics = Metrics(version="1")
        self.admission = AdmissionController(
            AdmissionLimits(),
            load=lambda backend: None,
            clock=lambda: self.now,
            emit=lambda event: None,
            random=random.Random(1),
            engine_of={"local": "local", "tuned": "local"},
        )
        remediation = Remediation(
            gate_of=self.admission.gate_name,
            scale=self.admission.scale,
            restart=lambda backend, reason: self.restarts.append((backend, reason)),
            clock=lambda: self.now,
            emit=self.events.append,
        )
        section = ResilienceSection(retry_most=1.0, retry_per_second=0.0)
        self.retries = make_retries(section, remediation, clock=lambda: self.now)
        budget = self.retries.policy.budget
        self.metrics.registry.register(plain("sluice_retry_budget", lambda: budget.left(self.now)))

    async def fail(self, kind: FailureKind, backend: str = "local") -> None:
        async def attempt(this: Attempt) -> None:
            raise BackendFailure(kind, "scripted", no_retry_here=True)

        with pytest.raises(BackendFailure):
            await self.retries.run(
                attempt,
                AttemptBounds(backend, CallBudget(), lambda: False, lambda: True, FAR, FAR),
            )


async def test_memory_that_ran_out_on_one_backend_lowers_the_gate_of_its_engine() -> None:
    rig = WiringRig()
    await rig.fail(FailureKind.CUDA_OOM, "tuned")
    assert rig.admission.gate("local").work.scale == 0.7
    assert rig.admission.gate("elsewhere").work.scale == 1.0


async def test_a_failing_device_asks_for_a_restart_of_its_engine() -> None:
    rig = WiringRig()
    await rig.fail(FailureKind.CUDA_OOM, "local")
    assert rig.restarts == []
    await rig.fail(FailureKind.CUDA_DRIVER_ERROR, "tuned")
    assert rig.restarts == [("tuned", "cuda_driver_error")]


def test_a_restart_is_of_the_engine_that_the_backend_is_on_and_of_no_other() -> None:
    asked: list[tuple[str | None, str]] = []

    class Host:
        def __init__(self, name: str | None) -> None:
            self.name = name

        def request_restart(self, reason: str) -> None:
            asked.append((self.name, reason))

    on = {None: ("local", "tuned"), "second": ("small",)}
    hosts: dict[str | None, Any] = {name: Host(name) for name in on}
    weights: Any = None
    parts = [EngineParts(name, EngineSection(), weights, on[name], hosts[name]) for name in on]
    engines = Engines(parts, {}, {}, {})
    assert [one.gate for one in parts] == ["local", "small"], "the backends of an engine share a gate"
    for backend in ("bedrock", "small", "tuned"):
        engines.restart(backend, f"of {backend}")
    assert asked == [("second", "of small"), (None, "of tuned")]


async def test_what_is_left_of_the_budget_shows_in_a_scrape() -> None:
    rig = WiringRig()
    await rig.fail(FailureKind.INTERNAL)
    shown = rig.metrics.registry.get_sample_value("sluice_retry_budget", {"backend": "local"})
    assert shown == 1.0


@pytest.mark.parametrize(
    ("given", "action"), [("retry", Action.RETRY), ("abort", Action.ABORT), (False, Action.OFF)]
)
def test_the_action_is_a_word_and_yamls_off_is_one(given: object, action: Action) -> None:
    assert ResilienceSection.model_validate({"degenerate_action": given}).degenerate_action is action
