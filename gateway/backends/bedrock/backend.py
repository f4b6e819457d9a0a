"""Bedrock as a backend."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import structlog

from admission.values import BackendLoad
from budgeting.estimating import EstimatingCounter, rough_tokens
from budgeting.values import Message, Role
from gateway.backends.bedrock.answer import ConverseReader
from gateway.backends.bedrock.call import EventBatches
from gateway.backends.bedrock.lanes import Lanes
from gateway.backends.bedrock.request import ConverseWriter
from gateway.backends.bedrock.transport import Transport
from gateway.backends.partial_answer import TextSplice, check_partial, generate_rest
from gateway.backends.port import BackendState, Completion, Continue, DeltaSink, Work
from gateway.contracts.features import Feature
from resilience.failures import BackendFailure, FailureKind

FEATURES = frozenset({Feature.TEMPERATURE, Feature.TOP_P, Feature.STOP})

# How long a call that was cut, or that has told all, may take to leave its thread before it is left alone. It
# keeps its lane then, and ends by the read timeout.
LEAVE_WAIT_S = 0.5


class BedrockBackend:
    """Generates on Bedrock, in threads of its own.

    Args:
        name: its name in the configuration.
        model: the model's id.
        writer: writes requests.
        transport: makes calls.
        counter: estimates the tokens of prompts, and learns from what Bedrock tells.
        max_concurrency: calls, and threads, at once.
        max_input_tokens: longest prompt, as estimated at most.
        total_timeout_s: longest time of one answer, waiting and region changes included.
        features: what the model can honour.
        prefill: the model completes a last message of the assistant.
        clock: seconds, monotonic.
    """

    kind = "bedrock"

    def __init__(
        self,
        name: str,
        *,
        model: str,
        writer: ConverseWriter,
        transport: Transport,
        counter: EstimatingCounter,
        max_concurrency: int,
        max_input_tokens: int,
        total_timeout_s: float,
        features: frozenset[Feature],
        prefill: bool,
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self.model = model
        self.continues = frozenset({Continue.TEXT} if prefill else ())
        self.features = features
        self._writer = writer
        self._transport = transport
        self._counter = counter
        self._max_input_tokens = max_input_tokens
        self._total_timeout_s = total_timeout_s
        self._clock = clock
        self._lanes = Lanes(max_concurrency)
        self._threads = ThreadPoolExecutor(max_concurrency, thread_name_prefix=f"bedrock-{name}")
        self._calls: set[EventBatches] = set()
        self._stopped = False
        self._log = structlog.get_logger("gateway.bedrock").bind(backend=name)

    @property
    def state(self) -> BackendState:
        """Ready until it is stopped: whether Bedrock answers shows in each call."""
        return BackendState.STOPPED if self._stopped else BackendState.READY

    @property
    def load(self) -> BackendLoad:
        """Its own calls; Bedrock tells nothing of its blocks or queues."""
        return BackendLoad(
            running=self._lanes.busy, waiting=self._lanes.waiting, max_running=self._lanes.count
        )

    async def run(self) -> None:
        """Load boto3 beforehand, then stay until cancelled; ends every call then."""
        try:
            loop = asyncio.get_running_loop()
            with contextlib.suppress(BackendFailure):  # each call will tell it
                await loop.run_in_executor(self._threads, self._transport.warm)
            await asyncio.Event().wait()
        finally:
            self.stop()

    def stop(self) -> None:
        """End every call at once; threads end with their calls."""
        self._stopped = True
        for call in self._calls:
            call.cut()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def generate(self, work: Work, out: DeltaSink) -> Completion:
        """Generate; leaving early, in whatever way, cuts the connection, which ends the thread's part.

        Until some text has come, a region that fails is replaced by the next one.
        """
        partial = check_partial(work, self.continues, self.name)
        if partial is None:
            return await self._generate(work, out)
        splice = TextSplice(partial.text, work.sampling.stop, partial.text[len(partial.text.rstrip()) :])
        return await generate_rest(splice, self._generate, work, out)

    async def _generate(self, work: Work, out: DeltaSink) -> Completion:
        if self._stopped:
            raise BackendFailure(FailureKind.BACKEND_UNAVAILABLE, f"{self.name} is stopped")
        request = self._writer.request(work)
        sent = _sent(work)
        estimate = self._counter.estimate(self.model, sent)
        if estimate.at_most > self._max_input_tokens:
            raise BackendFailure(
                FailureKind.TOKEN_LIMIT_EXCEEDED,
                f"the prompt may take {estimate.at_most} tokens on {self.model}, which is given at most "
                f"{self._max_input_tokens} (max_input_tokens)",
            )
        started_at = self._clock()
        try:
            async with asyncio.timeout(self._total_timeout_s) as limit:
                await self._lanes.enter()
                call = EventBatches(asyncio.get_running_loop())
                try:
                    thread = self._threads.submit(self._transport.ask, request, call)
                except RuntimeError as error:
                    self._lanes.leave()
                    raise BackendFailure(
                        FailureKind.BACKEND_UNAVAILABLE, f"{self.name} is stopped"
                    ) from error
                self._calls.add(call)
                thread.add_done_callback(partial(self._ended, call, asyncio.get_running_loop()))
                share = rough_tokens(work.messages) / rough_tokens(sent)
                reader = ConverseReader(
                    self._clock() - started_at, round(estimate.expected * share), share, work.sampling.stop
                )
                return await self._relay(call, reader, sent, out)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise BackendFailure(
                FailureKind.TIMEOUT,
                f"{self.name} took longer than {self._total_timeout_s:g} s (total_timeout_seconds)",
            ) from error

    async def _relay(
        self, call: EventBatches, reader: ConverseReader, sent: Sequence[Message], out: DeltaSink
    ) -> Completion:
        try:
            over = False
            while not over and not reader.complete:
                events, over = await call.take()
                delta = reader.feed(events)
                if delta is not None:
                    await out(delta)
            if not reader.stopped and not reader.cut:
                raise BackendFailure(
                    FailureKind.STREAM_BROKEN, f"{self.name}: the stream ended before the answer did"
                )
            if not reader.cut:
                # Its last bytes are on their way; read to the end, the connection can be used again.
                await call.gone(LEAVE_WAIT_S)
            rest, completion = reader.finish()
            if rest is not None:
                await out(rest)
        finally:
            call.cut()
            await call.gone(LEAVE_WAIT_S)
        usage = reader.usage
        if usage is None and reader.cut:
            self._log.debug("cut at a stop string of white space; tokens are estimated", model=self.model)
        elif usage is None:
            self._log.warning("no usage reported; tokens are estimated", model=self.model)
        else:
            self._counter.learn(self.model, sent, usage.input_tokens)
            self._log.debug(
                "answered",
                latency_ms=usage.latency_ms,
                cache_read_tokens=usage.cache_read_tokens,
                cache_write_tokens=usage.cache_write_tokens,
            )
        return completion

    def _ended(self, call: EventBatches, loop: asyncio.AbstractEventLoop, thread: Future[None]) -> None:
        if thread.cancelled():  # stopped before it began
            call.end(BackendFailure(FailureKind.BACKEND_UNAVAILABLE, f"{self.name} is stopped"))
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody counts any more
            loop.call_soon_threadsafe(self._left, call)

    def _left(self, call: EventBatches) -> None:
        self._calls.discard(call)
        self._lanes.leave()
        call.left()


def _sent(work: Work) -> tuple[Message, ...]:
    """The conversation with the beginning of its answer."""
    if work.partial is None:
        return work.messages
    return (*work.messages, Message(Role.ASSISTANT, work.partial.text))
