"""Threads for texts that would block the event loop, shared fairly by the tenants.

Tenants take turns. A large text takes much time and memory: a tenant may have one in a thread, and all
tenants together one for every two threads, so that smaller texts always find a thread. A waiting text is
dropped when its caller disconnects or at its deadline; one in a thread is finished, and counts until then.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from budgeting.plan import Offload
from gateway.contracts.deadlines import until_deadline
from gateway.contracts.values import GenerateRequest
from gateway.errors import RateLimited

LARGE_CHARS: Final = 262_144
"""Tokenizing a larger text takes more than 0.1 s (2.6 characters per microsecond)."""
MAX_WAITING: Final = 256  # the most texts of a tenant, waiting or in a thread
MAX_WAITING_CHARS: Final = 32 * 1024 * 1024
"""The most characters of these texts: eight of the largest bodies by default."""
THREADS: Final = max(2, min(8, os.cpu_count() or 2))
RETRY_MS: Final = 1_000
_LATE: Final = "before its prompt had been counted: send less text, or a later deadline"

T = TypeVar("T")


def give_memory_back() -> None:
    """Return memory freed in the C library to the system: about 100 bytes per character of a text."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # exists only in glibc
    if trim is not None:
        trim(0)


@dataclass(frozen=True, slots=True, eq=False)
class _TextJob:
    chars: int
    work: Callable[[], Any]
    done: asyncio.Future[Any]


class TextThreads:
    """Runs work on texts in threads. Lives on the event loop."""

    def __init__(
        self,
        threads: int = THREADS,
        give_back: Callable[[], None] = give_memory_back,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._give_back = give_back
        self._clock = clock
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="text")
        self._free = threads
        self._free_for_large = max(1, threads // 2)
        # Tenants in the order of their turns, with each tenant's jobs in the order of arrival.
        self.waiting: OrderedDict[str, list[_TextJob]] = OrderedDict()
        # Those in a thread, including those whose callers have disconnected.
        self.at_work: dict[str, list[_TextJob]] = {}

    def of(self, request: GenerateRequest) -> Offload:
        """Return a function that runs a request's work in its tenant's share, at most until its deadline.

        It raises DeadlineExceeded, and the errors of :meth:`run`.
        """

        async def offload(work: Callable[[], T], /) -> T:
            async with until_deadline(request, self._clock, _LATE):
                return await self.run(request.caller.tenant, text_chars(request), work)

        return offload

    async def run(self, tenant: str, chars: int, work: Callable[[], T]) -> T:
        """Return the result of ``work`` on a text of ``chars`` characters, from a thread.

        Raises RateLimited, and the errors of ``work``.
        """
        held = [*self.waiting.get(tenant, ()), *self.at_work.get(tenant, ())]
        if len(held) >= MAX_WAITING or (held and sum(one.chars for one in held) + chars > MAX_WAITING_CHARS):
            raise RateLimited(
                f"{len(held)} texts of the tenant are being tokenized; allowed: {MAX_WAITING}, "
                f"of {MAX_WAITING_CHARS} characters together",
                retry_after_ms=RETRY_MS,
            )
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        job = _TextJob(chars, work, done)
        self.waiting.setdefault(tenant, []).append(job)
        self._start()
        try:
            return await done
        finally:
            if job in self.waiting.get(tenant, ()):
                self._remove(self.waiting, tenant, job)

    def _start(self) -> None:
        while self._free and (found := self._next()) is not None:
            tenant, job = found
            self._remove(self.waiting, tenant, job)
            if tenant in self.waiting:
                self.waiting.move_to_end(tenant)
            self.at_work.setdefault(tenant, []).append(job)
            self._free -= 1
            self._free_for_large -= job.chars > LARGE_CHARS
            loop = asyncio.get_running_loop()
            try:
                doing = loop.run_in_executor(self._pool, self._do, job)
            except RuntimeError as error:  # the system starts no further thread
                doing = loop.create_future()
                doing.set_exception(error)
            doing.add_done_callback(partial(self._ended, tenant, job))

    def _do(self, job: _TextJob) -> Any:
        """Called in the thread."""
        try:
            return job.work()
        finally:
            if job.chars > LARGE_CHARS:
                self._give_back()

    def _next(self) -> tuple[str, _TextJob] | None:
        for tenant, jobs in self.waiting.items():
            large_too = self._free_for_large and not any(
                one.chars > LARGE_CHARS for one in self.at_work.get(tenant, ())
            )
            for job in jobs:
                if large_too or job.chars <= LARGE_CHARS:
                    return tenant, job
        return None

    def _ended(self, tenant: str, job: _TextJob, doing: asyncio.Future[Any]) -> None:
        self._remove(self.at_work, tenant, job)
        self._free += 1
        self._free_for_large += job.chars > LARGE_CHARS
        self._start()
        error = doing.exception()
        if job.done.done():
            return  # the caller has disconnected
        if error is None:
            job.done.set_result(doing.result())
        else:
            job.done.set_exception(error)

    @staticmethod
    def _remove(jobs: dict[str, list[_TextJob]], tenant: str, job: _TextJob) -> None:
        jobs[tenant].remove(job)
        if not jobs[tenant]:
            del jobs[tenant]


def text_chars(request: GenerateRequest) -> int:
    raw = request.raw_prompt
    return (
        sum(len(text) for message in request.messages for text in message.texts)
        + sum(
            len(text)
            for one in request.tools
            for text in (one.description, one.parameters, one.format)
            if text
        )
        + sum(len(chunk.text) for chunk in request.chunks)
        + (len(str(request.context)) if request.context else 0)
        + (0 if raw is None else len(raw))
    )
