"""The three tiers of health (seed 000 §14): alive, ready, and really generating."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from budgeting.values import Message, Role
from gateway.backends.port import Backend, Completion, Delta, Feature, Work
from gateway.backends.supervised import EngineStanding
from gateway.contracts.values import Sampling
from gateway.fleet import Fleet
from gateway.ports import TextService
from gateway.reception import Reception
from gateway.vitals import Vitals
from resilience.failures import BackendFailure
from resilience.supervisor import Standing

# Seed 001: above 98 % of memory the out-of-memory zone begins; above 50 % errors the circuit is open.
MEMORY_LIMIT = 0.98
ERROR_RATE_LIMIT = 0.5
DEEP_TIMEOUT_S = 10.0
DEEP_TOKENS = 5


@dataclass(frozen=True, slots=True)
class HealthProbe:
    """Answers the monitors; ``ping`` and ``ready`` only read what is known already."""

    fleet: Fleet
    reception: Reception
    vitals: Vitals
    text: Callable[[], TextService]
    model_loaded: Callable[[], bool]
    engine: Callable[[], EngineStanding] | None
    state_store_ok: Callable[[], bool]
    clock: Callable[[], float]
    started_at: float

    def ping(self) -> Mapping[str, object]:
        """Liveness: the process answers; the engine is not asked."""
        return {"status": "healthy", "uptime_seconds": round(self.clock() - self.started_at, 1)}

    def ready(self) -> tuple[bool, Mapping[str, object]]:
        """Readiness: whether traffic should come here, and each check."""
        loads = [backend.load for backend in self.fleet.backends.values()]
        checks = {
            "model_loaded": self.model_loaded(),
            "workers_ready": self.fleet.any_ready,
            "memory_available": not loads
            or any(load is None or load.kv_usage < MEMORY_LIMIT for load in loads),
            "error_rate_ok": self.vitals.error_rate() < ERROR_RATE_LIMIT,
            "state_store": self.state_store_ok(),
            "not_draining": not self.reception.draining,
        }
        ready = all(checks.values())
        engine = self.engine() if self.engine is not None else None
        status = "ready" if ready else "draining" if self.reception.draining else "not_ready"
        if status == "not_ready" and engine is not None and engine.standing is Standing.GIVEN_UP:
            status = "engine_given_up"
        body: dict[str, object] = {"ready": ready, "status": status, "checks": checks}
        if engine is not None:
            ready_in_s = engine.ready_in_s
            body["engine"] = {
                "state": engine.standing.value,
                "restarts_last_hour": engine.restarts_last_hour,
                "ready_in_seconds": None if ready_in_s is None else round(ready_in_s, 1),
            }
        return ready, body

    async def deep(self) -> tuple[bool, Mapping[str, object]]:
        """Generate a few tokens on every backend, outside admission and accounting."""
        results = {}
        for name, backend in self.fleet.backends.items():
            results[name] = await self._probe(backend)
        healthy = bool(results) and all(result["status"] == "healthy" for result in results.values())
        body: dict[str, object] = {
            "status": "healthy" if healthy else "unhealthy",
            "backends": results,
            "in_flight": self.reception.in_flight,
            "restarts_last_hour": self.engine().restarts_last_hour if self.engine is not None else 0,
            **self.vitals.figures(),
        }
        return healthy, body

    async def _probe(self, backend: Backend) -> dict[str, object]:
        begun = self.clock()
        result: dict[str, object] = {"state": backend.state.value}
        try:
            async with asyncio.timeout(DEEP_TIMEOUT_S):
                token_ids = await self.text().encode("test")
                sampling = Sampling(max_tokens=DEEP_TOKENS, temperature=0.0)
                raw = Feature.RAW_PROMPT in backend.features
                messages = () if raw else (Message(Role.USER, "test"),)
                work = Work(f"health-{begun}", token_ids, messages, sampling)
                completion: Completion = await backend.generate(work, _discard)
        except (BackendFailure, TimeoutError) as error:
            code = error.kind.value if isinstance(error, BackendFailure) else "timeout"
            return {**result, "status": "unhealthy", "error": code}
        load = backend.load
        return {
            **result,
            "status": "healthy",
            "latency_ms": round((self.clock() - begun) * 1000, 1),
            "output_tokens": completion.usage.output_tokens,
            "running": load.running if load else None,
            "waiting": load.waiting if load else None,
            "kv_utilization": round(load.kv_usage, 4) if load else None,
        }


async def _discard(delta: Delta) -> None:
    """Deep health needs the end of the generation, not its text."""
