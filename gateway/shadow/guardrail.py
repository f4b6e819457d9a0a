"""Checks the content of a canary's and its baseline's answers, after they were sent.

The answers are a sample (:mod:`gateway.routing.canary_tally`), taken by position and not by content. The
checks are those of the section ``shadow``; they run one answer at a time in a thread.
"""

import asyncio
from collections import deque

from gateway.contracts.answer import Answer
from gateway.generation.dispatcher import GenerationOutcome
from gateway.generation.job import Job
from gateway.routing.canary_tally import CanaryTally
from gateway.shadow.checks import Checks, Exam, exam_of

# The most answers that wait for their checks: one window's sample of both sides, and some of the next window.
MAX_WAITING = 256


class CanaryGuardrail:
    """Checks sampled answers and adds the results to the tally."""

    def __init__(self, checks: Checks, tally: CanaryTally) -> None:
        self._checks = checks
        self._tally = tally
        # The canary and the drawn backend of each answer, and what its checks get.
        self._waiting: deque[tuple[str, str, Exam]] = deque()
        self._not_empty = asyncio.Event()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def offer(self, job: Job, outcome: GenerationOutcome, answer: Answer) -> None:
        """Sample an answer of the drawn backend; takes microseconds and never waits."""
        request, drawn = job.request, job.drawn
        whole = answer.fallback is None and answer.usage.input_tokens > 0
        if drawn is None or answer.backend_name != drawn or not whole or len(self._waiting) >= MAX_WAITING:
            return
        session = None if request.session_id is None else hash((request.caller.tenant, request.session_id))
        canary = self._tally.samples(job.target.route.name, drawn, session)
        if canary is not None:
            self._waiting.append((canary, drawn, exam_of(request, outcome.plan, answer.output_text)))
            self._not_empty.set()

    async def run(self) -> None:
        while True:
            await self._not_empty.wait()
            while self._waiting:
                canary, drawn, exam = self._waiting[0]
                self._tally.examined(canary, drawn, await asyncio.to_thread(self._checks.run, exam))
                self._waiting.popleft()
            self._not_empty.clear()
