"""A scenario's run: undisturbed answers first, then the load and the faults, then what is left."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import secrets
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import aiohttp
import psutil

from ops.chaos.caller import CONNECT, ChaosCaller
from ops.chaos.errors import RigError
from ops.chaos.figures import Scrape, grown, holdings_of, read_ledger, read_metrics, read_seams
from ops.chaos.heard import Heard
from ops.chaos.report import ChaosReport
from ops.chaos.request_fate import Billed, ExpectedAnswers, Happened, fate_of
from ops.chaos.rig import Rig
from ops.chaos.scenario import Deed, Scenario
from ops.chaos.timeline import Timeline
from ops.chaos.workload import TITLES, ChaosRequest, text_of

# How often `/ready` is asked: the detection of a fault is told to this.
READY_POLL_S = 0.05
AGAIN_S = 0.5
# The ledger may lag so long behind an answer (the public surface).
LEDGER_LAG_S = 6.0
REST_WITHIN_S = 15.0
# A broken process must show in `/ready` within this; what has not by then is told as not seen.
SEEN_WITHIN_S = 5.0
CLIENT_CUT_S = 5.0
ON_UNIX = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "cont": signal.SIGCONT}


class ChaosRun:
    """One run.

    Args:
        scenario: what to do.
        rig: what to do it to.
        watch: shows the run while its block lasts.
    """

    def __init__(
        self,
        scenario: Scenario,
        rig: Rig,
        *,
        watch: Callable[[ChaosRun], AbstractContextManager[None]] | None = None,
    ) -> None:
        self.scenario = scenario
        self.heard: list[Heard] = []
        self.sent = 0
        self.happened: list[Happened] = []
        self._rig = rig
        self._watch = watch
        self._id = f"chaos-{secrets.token_hex(4)}-"
        self._origin = time.monotonic()
        self._pieces = 0
        self._news = asyncio.Event()
        self._timeline = Timeline(scenario.faults, scenario.random)
        self._report = ChaosReport(scenario)

    def now_s(self) -> float:
        """Seconds since the load began."""
        return time.monotonic() - self._origin

    async def go(self) -> ChaosReport:
        """Run it.

        Raises:
            RigError: the gateway does not answer even undisturbed, or a fault cannot be made.
        """
        rig, report = self._rig, self._report
        async with self._caller() as caller:
            known = await self._undisturbed(caller)
            before = await self._at_rest(caller)
            report.before = None if rig.gateway_pid is None else holdings_of(rig.gateway_pid)
            self._origin = time.monotonic()
            for deed in self._timeline.due(0.0, 0.0):  # what is due at 0 is in force for every request
                await self._do(caller, deed)
            self._origin = time.monotonic()
            with self._watch(self) if self._watch is not None else contextlib.nullcontext():
                try:
                    await self._load(caller)
                except BaseExceptionGroup as errors:
                    raise _only(errors) from None
            report.wall_s = self.now_s()
            report.never_done = [deed.label for deed in self._timeline.left if deed.breaks is not None]
            for deed in self._timeline.mend():
                await self._do(caller, deed)
            ready = await self._ready_again(caller)
        # Without the callers' connections.
        async with self._caller() as caller:
            after = await self._at_rest(caller) if ready else None
        report.at_rest = None if after is None else after.at_rest
        if before is not None and after is not None:
            report.reported = grown(before, after)
        with contextlib.suppress(psutil.Error):
            report.after = None if rig.gateway_pid is None else holdings_of(rig.gateway_pid)
        rows = await self._rows()
        seams = None
        if rig.log is not None:
            seams = await asyncio.to_thread(read_seams, rig.log, self._id)
        report.happened = self.happened
        report.fates = [
            fate_of(
                one,
                known,
                self.happened,
                rows=None if rows is None else rows.get(one.question.request_id, []),
                seams=None if seams is None else seams.get(one.question.request_id),
            )
            for one in sorted(self.heard, key=lambda one: one.sent_s)
        ]
        report.judge(ready)
        return report

    def _caller(self) -> ChaosCaller:
        return ChaosCaller(
            self._rig.url,
            key=self._rig.key,
            timeout_s=self.scenario.load.timeout_s,
            clock=self.now_s,
            on_piece=self._on_piece,
        )

    def _on_piece(self) -> None:
        self._pieces += 1
        self._news.set()

    async def _undisturbed(self, caller: ChaosCaller) -> ExpectedAnswers:
        load = self.scenario.load
        texts: dict[str, str] = {}
        tokens: dict[str, int] = {}
        for number in range(min(load.streams + load.whole, len(TITLES))):
            text = text_of(number)
            texts[text], tokens[text] = await self._known(caller, number)
        return ExpectedAnswers(texts, tokens, self._rig.bedrock_text)

    async def _known(self, caller: ChaosCaller, number: int) -> tuple[str, int]:
        """One undisturbed answer and its tokens; what broke before may take ``settle_s`` to be mended."""
        end = time.monotonic() + self.scenario.settle_s
        for again in itertools.count():
            question = ChaosRequest(f"{self._id}known-{number}-{again}", text_of(number), stream=False)
            heard = await caller.ask(question, self.scenario.load.max_tokens, None)
            answer = heard.answer or {}
            finish, fallback = answer.get("finish_reason"), answer.get("fallback")
            if finish == "stop" and fallback is None:
                return heard.text, answer["usage"]["output_tokens"]
            if time.monotonic() > end or heard.code in (CONNECT, "invalid_key", "missing_key"):
                why = heard.code or f"{finish}, {fallback}"
                raise RigError(f"{self._rig.url}: no whole answer even undisturbed: {why}")
            await asyncio.sleep(AGAIN_S)
        raise AssertionError("counting does not end")

    async def _load(self, caller: ChaosCaller) -> None:
        load = self.scenario.load
        async with asyncio.TaskGroup() as around:
            beside = [
                around.create_task(self._sabotage(caller)),
                around.create_task(self._watch_ready(caller)),
            ]
            async with asyncio.TaskGroup() as clients:
                for number in range(load.streams + load.whole):
                    clients.create_task(self._client(caller, number, stream=number < load.streams))
            for task in beside:
                task.cancel()

    async def _client(self, caller: ChaosCaller, number: int, *, stream: bool) -> None:
        load = self.scenario.load
        for turn in range(load.rounds):
            if load.for_s is not None and self.now_s() >= load.for_s:
                return
            self.sent += 1
            question = ChaosRequest(f"{self._id}{number}-{turn}", text_of(number), stream)
            self.heard.append(await caller.ask(question, load.max_tokens, load.deadline_ms))
            if load.pause_s:
                await asyncio.sleep(load.pause_s)

    async def _sabotage(self, caller: ChaosCaller) -> None:
        streams = max(1, self.scenario.load.streams)
        while not self._timeline.over:
            for deed in self._timeline.due(self.now_s(), self._pieces / streams):
                await self._do(caller, deed)
            self._news.clear()
            wait_s = self._timeline.next_s - self.now_s()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if math.isinf(wait_s) else max(0.0, wait_s)):
                    await self._news.wait()

    async def _do(self, caller: ChaosCaller, deed: Deed) -> None:
        began_s = self.now_s()
        for name, number in ON_UNIX.items():
            role = getattr(deed, name)
            if role is not None:
                self._rig.signal(role, number)
        if deed.restart is not None:
            await self._rig.restart(deed.restart, self.scenario.start.ready_within_s)
        if deed.bedrock is not None:
            await self._rig.bedrock(deed.bedrock)
        if deed.inject is not None:
            rules = [rule.model_dump(mode="json", exclude_none=True) for rule in deed.inject]
            try:
                await caller.call("/admin/chaos", {"faults": rules})
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise RigError(
                    f"/admin/chaos does not take the faults ({error}); is chaos.enabled true there?"
                ) from None
        self.happened.append(Happened(began_s, deed.label, deed.breaks))

    async def _watch_ready(self, caller: ChaosCaller) -> None:
        while True:
            await self._look(caller)
            await asyncio.sleep(READY_POLL_S)

    async def _look(self, caller: ChaosCaller) -> bool:
        """Note whether it is ready when that has changed; whether it is."""
        failing, seen = await caller.unready(), self._report.readiness
        if not seen or seen[-1][1] != failing:
            seen.append((self.now_s(), failing))
        return not failing

    async def _ready_again(self, caller: ChaosCaller) -> bool:
        end_s = self.now_s() + self.scenario.settle_s
        while not await self._look(caller) or self._unseen():
            if self.now_s() >= end_s:
                return False
            await asyncio.sleep(READY_POLL_S)
        return True

    def _unseen(self) -> bool:
        """Whether a deed has broken what serves just now, and `/ready` may still have to notice it."""
        broken = [one.at_s for one in self.happened if one.breaks in ("engine", "gateway")]
        if not broken or self.now_s() - broken[-1] > SEEN_WITHIN_S:
            return False
        return not any(failing and at_s >= broken[-1] for at_s, failing in self._report.readiness)

    async def _at_rest(self, caller: ChaosCaller) -> Scrape | None:
        """The figures once nothing is under way, or as they are when that does not come."""
        end, scrape = time.monotonic() + REST_WITHIN_S, None
        while scrape is None or not scrape.at_rest:
            if time.monotonic() > end:
                return scrape
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                scrape = read_metrics(await caller.call("/metrics"))
            await asyncio.sleep(READY_POLL_S)
        return scrape

    async def _rows(self) -> dict[str, list[Billed]] | None:
        """The ledger's rows of this run, once those that must be there are, or its lag has passed."""
        ledger = self._rig.ledger
        if ledger is None:
            return None
        wanted = {one.question.request_id for one in self.heard if one.answer is not None or one.pieces}
        end = time.monotonic() + LEDGER_LAG_S
        while True:
            rows = await asyncio.to_thread(read_ledger, ledger, self._id)
            if wanted <= rows.keys() or time.monotonic() > end:
                return rows
            await asyncio.sleep(READY_POLL_S)


def _only(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """What the run failed with: a fault that cannot be made, before all that came of it."""
    found = errors.subgroup(RigError)
    inner: BaseException = found if found is not None else errors
    while isinstance(inner, BaseExceptionGroup):
        inner = inner.exceptions[0]
    return inner
