"""A hung engine is found by its own step times, and a long prefill is not taken for one."""

from __future__ import annotations

import random

import pytest

from resilience.heartbeat import KNOWN_STEPS, PromptTokens
from resilience.supervisor import Loss, Observation, Supervisor

LOOK_S = 0.25
HANG_S = 30.0
STEP_TOKENS = 8192
ADAPTER_SLOWER = 28  # as vLLM on a CPU


class Engine:
    """A simulated engine that a supervisor observes, with a clock of its own.

    ``token_s`` is the time of a prompt token, ``decode_s`` that of a step without prompts, in seconds. A part
    of a prompt's tokens may be in the prefix cache, which is not known before the step.
    """

    def __init__(self, *, decode_s: float = 0.02, token_s: float = 0.0005, seed: int = 7) -> None:
        self.supervisor = Supervisor(max_restarts_per_hour=5, hang_s=HANG_S, stopped_s=0.5)
        self.supervisor.load_begun(-1.0)
        self.supervisor.started(0.0)
        self.decode_s, self.token_s = decode_s, token_s
        self.random = random.Random(seed)
        self.now = 0.0
        self.steps = 0
        self.next_look = 0.0
        self.found: tuple[float, Loss] | None = None

    def elapse(
        self,
        seconds: float,
        *,
        pending: int = 0,
        adapter: bool = False,
        occupied: bool = False,
        unfinished: int = 1,
    ) -> None:
        """Advances the clock while the engine reports nothing; the supervisor observes it, sometimes late."""
        end = self.now + seconds
        while self.next_look <= end and self.found is None:
            seen = Observation(
                unfinished=unfinished,
                steps=self.steps,
                pending=prompts(pending, adapter=adapter),
                occupied=occupied,
            )
            if (loss := self.supervisor.observe(self.next_look, seen)) is not None:
                self.found = self.next_look, loss
            late = self.random.random() < 0.002
            self.next_look += LOOK_S if not late else self.random.uniform(0.5, 1.9)
        self.now = end

    def step(
        self,
        seconds: float,
        *,
        pending: int = 0,
        adapter: bool = False,
        computed: int = 0,
        more: bool = True,
    ) -> None:
        heartbeat = self.supervisor.heartbeat
        heartbeat.got_work(self.now, adapter=adapter)
        self.elapse(seconds, pending=pending, adapter=adapter)
        self.steps += 1
        left = prompts(max(0, pending - STEP_TOKENS), adapter=adapter)
        heartbeat.stepped(self.now, unfinished=more, computed_tokens=computed, pending=left)

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            self.step(self.decode_s * self.random.uniform(0.7, 1.6))

    def prefill(self, tokens: int, *, cached: float = 0.0, adapter: bool = False) -> None:
        """Runs a prompt in steps of at most ``STEP_TOKENS``; later ones are slower (longer context)."""
        left = tokens
        while left > 0:
            chunk = min(left, STEP_TOKENS)
            computed = int(chunk * (1 - cached))
            slower = 1 + (tokens - left) / 32_768
            if adapter:
                slower *= ADAPTER_SLOWER
            took_s = self.decode_s + computed * self.token_s * slower * self.random.uniform(0.7, 1.5)
            self.step(took_s, pending=left, adapter=adapter, computed=computed)
            left -= chunk


def prompts(tokens: int, *, adapter: bool) -> PromptTokens:
    base, adapters = (0, tokens) if adapter else (tokens, 0)
    return PromptTokens.in_a_step(base, adapters, STEP_TOKENS)


def hang(engine: Engine, *, pending: int = 0, adapter: bool = False) -> float:
    """Lets the engine make no more steps; returns the seconds until the supervisor finds that."""
    engine.supervisor.heartbeat.got_work(engine.now, adapter=adapter)
    struck = engine.now
    engine.elapse(60.0, pending=pending, adapter=adapter)
    assert engine.found is not None and engine.found[1] is Loss.NO_PROGRESS
    return engine.found[0] - struck


@pytest.mark.slow
@pytest.mark.parametrize("token_s", [0.0001, 0.0003, 0.0007])
def test_an_hour_of_long_prefills_is_no_hang_and_a_hang_after_it_is_found_in_three_seconds(
    token_s: float,
) -> None:
    engine = Engine(token_s=token_s)
    engine.decode(200)
    longest = 0.0
    while engine.now < 3600.0:
        began = engine.now
        # Prompts of 100 to 60,000 tokens, of which a part may be cached; nothing about them is known before.
        engine.prefill(
            int(10 ** engine.random.uniform(2, 4.78)), cached=engine.random.choice((0.0, 0.0, 0.5, 0.97))
        )
        longest = max(longest, engine.now - began)
        engine.decode(engine.random.randrange(0, 60))
        if engine.random.random() < 0.1:  # an idle engine makes no steps
            engine.step(0.02, more=False)
            engine.elapse(engine.random.uniform(1, 30), unfinished=0)
    assert engine.found is None
    assert longest > 3.0
    engine.decode(600)
    assert hang(engine) < 3.0


def test_the_first_long_prompt_after_many_short_steps_is_given_its_time() -> None:
    engine = Engine(token_s=0.0008)
    engine.decode(5_000)
    engine.prefill(60_000)
    assert engine.found is None and engine.now > 100 + 30


def test_a_hang_while_decoding_is_found_within_three_seconds() -> None:
    engine = Engine()
    engine.prefill(2_000)
    engine.decode(2 * KNOWN_STEPS)
    assert 1.0 <= hang(engine) < 3.0


def test_a_hang_in_a_known_prefill_is_found_after_five_times_its_length() -> None:
    engine = Engine(token_s=0.0001)
    for _ in range(5):
        engine.prefill(8_000)
        engine.decode(KNOWN_STEPS)
    assert 1.0 <= hang(engine, pending=4_000) < 5 * 4_000 * 0.0001 * 1.6 + 1.0


def test_the_first_prompt_for_an_adapter_has_the_configured_time_though_the_models_own_are_fast() -> None:
    engine = Engine(token_s=0.0001)
    for _ in range(5):
        engine.prefill(2_000)
        engine.decode(KNOWN_STEPS)
    began = engine.now
    engine.prefill(4_000, adapter=True)
    assert engine.found is None and engine.now - began > 5.0


def test_a_hang_is_found_by_the_speed_of_the_prompts_of_its_kind() -> None:
    for adapter, longest in ((False, 2_000 * 0.0001), (True, 2_000 * 0.0001 * ADAPTER_SLOWER)):
        engine = Engine(token_s=0.0001)
        for _ in range(5):
            engine.prefill(1_000)
            engine.prefill(300, adapter=True)
            engine.decode(KNOWN_STEPS)
        found_s = hang(engine, pending=1_000, adapter=adapter)
        assert (5.0 if adapter else 1.0) <= found_s < 2.0 + 5 * longest


def test_a_prompt_of_the_model_beside_one_for_an_adapter_says_nothing_about_adapters() -> None:
    engine = Engine(token_s=0.0001)
    engine.decode(KNOWN_STEPS)
    heartbeat = engine.supervisor.heartbeat
    heartbeat.got_work(engine.now)
    heartbeat.got_work(engine.now, adapter=True)
    engine.step(0.2, pending=2_000, computed=1_000)
    assert HANG_S <= hang(engine, pending=1_000, adapter=True) < HANG_S + 2.0


def test_before_its_steps_are_known_an_engine_has_the_configured_time() -> None:
    engine = Engine()
    engine.decode(KNOWN_STEPS // 2)
    assert HANG_S <= hang(engine) < HANG_S + 2.0


def test_slow_steps_raise_the_limit_and_the_configured_one_is_its_bound() -> None:
    slow = Engine(decode_s=0.5)
    slow.decode(100)
    slow.step(3.0)
    assert slow.found is None
    slower = Engine(decode_s=10.0)
    slower.decode(100)
    assert slower.found is None
    assert HANG_S <= hang(slower) < HANG_S + 2.0


def test_loading_an_adapter_is_no_hang() -> None:
    engine = Engine()
    engine.decode(KNOWN_STEPS)
    engine.elapse(20.0, occupied=True)
    assert engine.found is None


def test_a_gateway_that_could_not_read_the_reports_blames_no_engine() -> None:
    engine = Engine()
    engine.decode(KNOWN_STEPS)
    supervisor, now = engine.supervisor, engine.next_look
    assert supervisor.observe(now, Observation(unfinished=1, steps=engine.steps)) is None
    assert supervisor.observe(now + 1.9, Observation(unfinished=1, steps=engine.steps)) is None
