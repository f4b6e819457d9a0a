"""Runs a scenario: first reference answers, then load with faults, then the final state."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass

import psutil

from ops.chaos.caller import ChaosCaller
from ops.chaos.errors import ChaosError
from ops.chaos.figures import Scrape, grown, holdings_of, read_ledger, read_metrics, read_seams
from ops.chaos.report import ChaosReport
from ops.chaos.request_outcome import AppliedFault, ExpectedAnswers, outcome_of
from ops.chaos.scenario import FaultAction, Scenario
from ops.chaos.testbed import Testbed
from ops.chaos.timeline import Timeline
from ops.chaos.workload import TITLES, ChaosRequest, ObservedAnswer, text_of
from ops.client import AdminError
from resilience.task_groups import all_or_error

# Interval of polling `/ready`, and so the resolution of the detection time of a fault.
READY_POLL_S = 0.05
AGAIN_S = 0.5
# Longest time until an answer's row is in the ledger.
LEDGER_LAG_S = 6.0
REST_WITHIN_S = 15.0
# Longest time, in seconds, that the run waits for `/ready` to detect a broken process.
DETECTED_WITHIN_S = 5.0
ON_UNIX = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "cont": signal.SIGCONT}


@dataclass(eq=False)
class ChaosRun:
    """One run of a scenario on the testbed's processes; ``watch`` shows its progress."""

    scenario: Scenario
    testbed: Testbed
    _: KW_ONLY
    watch: Callable[[ChaosRun], AbstractContextManager[object]] = lambda run: contextlib.nullcontext()

    def __post_init__(self) -> None:
        self.observed: list[ObservedAnswer] = []
        self.sent = 0
        self._id = f"chaos-{secrets.token_hex(4)}-"
        self._origin = time.monotonic()
        self._pieces = 0
        self._news = asyncio.Event()
        self._timeline = Timeline(self.scenario.faults, self.scenario.random)
        self.report = ChaosReport(self.scenario)

    def now_s(self) -> float:
        """Seconds since the load began."""
        return time.monotonic() - self._origin

    async def go(self) -> ChaosReport:
        """Run the scenario and return its report.

        Raises ChaosError, AdminError: the gateway does not answer even without faults, its ledger or log
        cannot be read, or a fault cannot be injected.
        """
        testbed, report = self.testbed, self.report
        # Another server's answers would be asked for until ``settle_s``.
        if "checks" not in await asyncio.to_thread(testbed.client.get, "ready", accept=(503,)):
            raise ChaosError(f"{testbed.url}: /ready is not a gateway's; is the gateway running there?")
        async with ChaosCaller(
            testbed.url, key=testbed.key, timeout_s=self.scenario.load.timeout_s, clock=self.now_s
        ) as caller:
            known = await self._reference_answers(caller)
            await self._evidence()  # what cannot be read ends the run here, not after the load
            before = await self._at_rest()
            report.before = None if testbed.gateway_pid is None else holdings_of(testbed.gateway_pid)
            self._origin = time.monotonic()
            for action in self._timeline.due(0.0, 0.0):  # faults at 0 apply to every request
                await self._do(action)
            self._origin = time.monotonic()
            with self.watch(self):
                await self._load(caller)
            report.wall_s = self.now_s()
            report.never_done = [action.label for action in self._timeline.left if action.breaks is not None]
            for action in self._timeline.end():
                await self._do(action)
            ready = await self._ready_again(caller)
        # The caller's idle connections are closed now.
        after = await self._at_rest() if ready else None
        report.at_rest = None if after is None else after.at_rest
        if before is not None and after is not None:
            report.reported = grown(before, after)
        with contextlib.suppress(psutil.Error):
            report.after = None if testbed.gateway_pid is None else holdings_of(testbed.gateway_pid)
        rows, seams = await self._evidence()
        report.outcomes = [
            outcome_of(
                one,
                known,
                report.injected,
                rows=None if rows is None else rows.get(one.question.request_id, []),
                seams=None if seams is None else seams.get(one.question.request_id),
            )
            for one in sorted(self.observed, key=lambda one: one.sent_s)
        ]
        report.judge(ready)
        return report

    def _on_piece(self) -> None:
        self._pieces += 1
        self._news.set()

    async def _reference_answers(self, caller: ChaosCaller) -> ExpectedAnswers:
        load = self.scenario.load
        numbers = range(min(load.streams + load.whole, len(TITLES)))
        texts = {text_of(number): await self._known(caller, number) for number in numbers}
        return ExpectedAnswers(texts, self.testbed.bedrock_text)

    async def _known(self, caller: ChaosCaller, number: int) -> str:
        """One reference answer; retries up to ``settle_s`` after an earlier fault."""
        end, again = time.monotonic() + self.scenario.settle_s, 0
        while True:
            question = ChaosRequest(f"{self._id}known-{number}-{again}", text_of(number), stream=False)
            observed = await caller.ask(question, self.scenario.load.max_tokens, None)
            answer = observed.answer or {}
            finish, fallback = answer.get("finish_reason"), answer.get("fallback")
            if finish == "stop" and fallback is None:
                return observed.text
            too_long = finish == "length" and fallback is None
            hopeless = too_long or observed.code in ("invalid_key", "missing_key")
            if hopeless or time.monotonic() > end:
                why = observed.code or f"finish_reason {finish}, fallback {fallback}"
                if too_long:
                    why = f"longer than load.max_tokens ({self.scenario.load.max_tokens})"
                raise ChaosError(f"{self.testbed.url}: no whole answer even without faults: {why}")
            await asyncio.sleep(AGAIN_S)
            again += 1

    async def _load(self, caller: ChaosCaller) -> None:
        load = self.scenario.load
        async with all_or_error() as around:
            background = [
                around.create_task(self._inject_faults()),
                around.create_task(self._watch_ready(caller)),
            ]
            async with all_or_error() as clients:
                for number in range(load.streams + load.whole):
                    clients.create_task(self._client(caller, number, stream=number < load.streams))
            for task in background:
                task.cancel()

    async def _client(self, caller: ChaosCaller, number: int, *, stream: bool) -> None:
        load = self.scenario.load
        for turn in range(load.rounds):
            if load.for_s is not None and self.now_s() >= load.for_s:
                return
            self.sent += 1
            question = ChaosRequest(f"{self._id}{number}-{turn}", text_of(number), stream)
            asked = caller.ask(question, load.max_tokens, load.deadline_ms, self._on_piece)
            self.observed.append(await asked)
            if load.pause_s:
                await asyncio.sleep(load.pause_s)

    async def _inject_faults(self) -> None:
        streams = max(1, self.scenario.load.streams)
        while not self._timeline.over:
            for action in self._timeline.due(self.now_s(), self._pieces / streams):
                await self._do(action)
            self._news.clear()
            wait_s = self._timeline.next_s - self.now_s()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if math.isinf(wait_s) else max(0.0, wait_s)):
                    await self._news.wait()

    async def _do(self, action: FaultAction) -> None:
        began_s = self.now_s()
        for name, number in ON_UNIX.items():
            role = getattr(action, name)
            if role is not None:
                self.testbed.signal(role, number)
        if action.restart is not None:
            await self.testbed.restart(action.restart, self.scenario.start.ready_within_s)
        if action.bedrock is not None:
            await self.testbed.bedrock(action.bedrock)
        if action.inject is not None:
            rules = [rule.model_dump(mode="json", exclude_none=True) for rule in action.inject]
            try:
                await asyncio.to_thread(self.testbed.client.post, "admin", "chaos", body={"faults": rules})
            except AdminError as error:
                raise ChaosError(
                    f"/admin/chaos does not take the faults ({error}); is chaos.enabled true there?"
                ) from None
        self.report.injected.append(AppliedFault(began_s, action.label, action.breaks))

    async def _watch_ready(self, caller: ChaosCaller) -> None:
        while True:
            await self._poll_ready(caller)
            await asyncio.sleep(READY_POLL_S)

    async def _poll_ready(self, caller: ChaosCaller) -> bool:
        """Record readiness if it has changed; returns whether the gateway is ready."""
        failing, changes = await caller.unready(), self.report.readiness
        if not changes or changes[-1][1] != failing:
            changes.append((self.now_s(), failing))
        return not failing

    async def _ready_again(self, caller: ChaosCaller) -> bool:
        end_s = self.now_s() + self.scenario.settle_s
        while not await self._poll_ready(caller) or self._undetected():
            if self.now_s() >= end_s:
                return False
            await asyncio.sleep(READY_POLL_S)
        return True

    def _undetected(self) -> bool:
        """Whether the last action that broke a serving process is recent and not yet visible in `/ready`."""
        broken = [one.at_s for one in self.report.injected if one.breaks in ("engine", "gateway")]
        if not broken or self.now_s() - broken[-1] > DETECTED_WITHIN_S:
            return False
        return not any(failing and at_s >= broken[-1] for at_s, failing in self.report.readiness)

    async def _at_rest(self) -> Scrape | None:
        """The metrics when no request is in flight any more, or the last ones at the time limit."""
        end, scrape = time.monotonic() + REST_WITHIN_S, None
        while scrape is None or not scrape.at_rest:
            if time.monotonic() > end:
                return scrape
            with contextlib.suppress(AdminError):
                scrape = read_metrics(await asyncio.to_thread(self.testbed.client.text, "metrics"))
            await asyncio.sleep(READY_POLL_S)
        return scrape

    async def _evidence(self) -> tuple[dict[str, list[int]] | None, dict[str, tuple[str, ...]] | None]:
        """The ledger's rows, and from the log where answers were resumed; ``None``: not on this machine."""
        log = self.testbed.log
        try:
            seams = None if log is None else await asyncio.to_thread(read_seams, log, self._id)
            return await self._rows(), seams
        except (OSError, sqlite3.Error) as error:
            raise ChaosError(f"--ledger, --log: cannot be read ({error})") from None

    async def _rows(self) -> dict[str, list[int]] | None:
        """The ledger's rows of this run, when all expected ones are there or the time limit has passed."""
        ledger = self.testbed.ledger
        if ledger is None:
            return None
        wanted = {one.question.request_id for one in self.observed if one.answer is not None or one.pieces}
        end = time.monotonic() + LEDGER_LAG_S
        while True:
            rows = await asyncio.to_thread(read_ledger, ledger, self._id)
            if wanted <= rows.keys() or time.monotonic() > end:
                return rows
            await asyncio.sleep(READY_POLL_S)
