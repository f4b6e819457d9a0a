"""Bedrock as a backend."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import structlog

from admission.values import BackendLoad
from budgeting.estimating import EstimatingCounter, rough_tokens
from budgeting.values import Message, Role
from gateway.backends.bedrock.answer import ConverseReader, InvokedModel
from gateway.backends.bedrock.call import EventBatches, Lanes
from gateway.backends.bedrock.invoked import family_of, rerank_request, scores_of
from gateway.backends.bedrock.request import ConverseWriter
from gateway.backends.bedrock.tools import ConverseTools, tools_as_messages
from gateway.backends.bedrock.transport import Transport
from gateway.backends.partial_answer import check_partial, generate_rest
from gateway.backends.port import (
    BackendState,
    Completion,
    Continue,
    DeltaSink,
    Work,
)
from gateway.config.backends import BedrockSection
from gateway.contracts.embeddings import EmbeddingsAnswer, EmbeddingsRequest
from gateway.contracts.events import Delta
from gateway.contracts.features import Feature
from gateway.contracts.rerank import ScoreAnswer, ScoreRequest
from resilience.failures import BackendFailure, FailureKind, invalid_input

FEATURES = frozenset(
    {
        Feature.TEMPERATURE,
        Feature.TOP_P,
        Feature.STOP,
        Feature.TOOLS,
        Feature.CUSTOM_TOOLS,
        Feature.ALLOWED_TOOLS,
        Feature.IMAGES,
    }
)


class BedrockBackend:
    """Generates on Bedrock, in threads of its own.

    Args:
        counter: estimates the tokens of prompts, and learns from Bedrock's counts.
        prefill: whether the model completes a last message of the assistant.
    """

    kind = "bedrock"

    def __init__(
        self,
        name: str,
        section: BedrockSection,
        *,
        writer: ConverseWriter,
        transport: Transport,
        counter: EstimatingCounter,
        features: frozenset[Feature],
        prefill: bool,
        clock: Callable[[], float],
    ) -> None:
        self.name = name
        self.model = section.model_id
        self.continues = frozenset({Continue.TEXT} if prefill else ())
        self.features = features
        self._writer = writer
        self._transport = transport
        self._counter = counter
        self._max_input_tokens = section.max_input_tokens
        self._total_timeout_s = section.total_timeout_seconds
        self._clock = clock
        self._lanes = Lanes(section.max_concurrency)
        self._threads = ThreadPoolExecutor(section.max_concurrency, thread_name_prefix=f"bedrock-{name}")
        self._calls: set[EventBatches] = set()
        self._stopped = False
        self._log = structlog.get_logger("gateway.bedrock").bind(backend=name)

    @property
    def state(self) -> BackendState:
        """Ready until it is stopped: each call shows whether Bedrock answers."""
        return BackendState.STOPPED if self._stopped else BackendState.READY

    @property
    def load(self) -> BackendLoad:
        """The gateway's own calls; Bedrock reports neither blocks nor queues."""
        return BackendLoad(
            running=self._lanes.busy, waiting=self._lanes.waiting, max_running=self._lanes.count
        )

    async def run(self) -> None:
        """Load boto3, then wait until cancelled; then end every call."""
        try:
            loop = asyncio.get_running_loop()
            with contextlib.suppress(BackendFailure):  # each call reports it
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
        """Generate; cancelling cuts the connection, which ends the thread's call.

        If a region fails before any text has come, the next region is asked.
        """
        check_partial(work, self.continues, self.name)
        return await generate_rest(self._generate, work, out, trimmed=True)

    async def _generate(self, work: Work, out: DeltaSink) -> Completion:
        if self._stopped:
            raise BackendFailure(FailureKind.BACKEND_UNAVAILABLE, f"{self.name} is stopped")
        tools = ConverseTools(work)
        request = self._writer.request(work, tools)
        own = (*tools_as_messages(work), *work.messages)
        sent = own if work.partial is None else (*own, Message(Role.ASSISTANT, work.partial.text))
        estimate = self._counter.estimate(self.model, sent)
        at_most = estimate.at_most + work.image_tokens
        if at_most > self._max_input_tokens:
            raise BackendFailure(
                FailureKind.TOKEN_LIMIT_EXCEEDED,
                f"the prompt may take {at_most} tokens on {self.model}, which is given at most "
                f"{self._max_input_tokens} (max_input_tokens)",
            )
        started_at = self._clock()
        async with self._in_time() as limit, self._call(request) as call:
            share = rough_tokens(own) / rough_tokens(sent)
            waited_s = self._clock() - started_at
            estimated_input = round(estimate.expected * share) + work.image_tokens
            reader = ConverseReader(tools, waited_s, estimated_input, share, work.sampling.stop)
            return await self._relay(call, reader, sent, partial(_send_whole, limit, out))

    @contextlib.asynccontextmanager
    async def _call(self, request: Mapping[str, Any]) -> AsyncIterator[EventBatches]:
        """Make a call in a thread, once there is a lane; it is cut at the end of the block."""
        await self._lanes.enter()
        loop = asyncio.get_running_loop()
        call = EventBatches(loop)
        try:
            call.thread = loop.run_in_executor(self._threads, self._transport.ask, request, call)
        except RuntimeError as error:  # stopped, or no thread can be started: then a later one finds the call
            call.cut()
            self._lanes.leave()
            text = f"{self.name} takes no call: {error}"
            raise BackendFailure(FailureKind.BACKEND_UNAVAILABLE, text) from error
        self._calls.add(call)
        call.thread.add_done_callback(partial(self._thread_ended, call))
        try:
            yield call
        finally:
            call.cut()
            await call.wait_thread_ended()

    @contextlib.asynccontextmanager
    async def _in_time(self) -> AsyncIterator[asyncio.Timeout]:
        try:
            async with asyncio.timeout(self._total_timeout_s) as limit:
                yield limit
        except TimeoutError as error:
            if not limit.expired():
                raise
            text = f"{self.name} took longer than {self._total_timeout_s:g} s (total_timeout_seconds)"
            raise BackendFailure(FailureKind.TIMEOUT, text) from error

    async def _relay(
        self, call: EventBatches, reader: ConverseReader, sent: Sequence[Message], out: DeltaSink
    ) -> Completion:
        over = False
        while not over and not reader.complete:
            events, over = await call.take()
            for piece in reader.feed(events):
                await out(piece)
        if not reader.stopped and not reader.cut:
            raise BackendFailure(
                FailureKind.STREAM_BROKEN, f"{self.name}: the stream ended before the answer did"
            )
        if not reader.cut:
            # Wait for the last bytes: a connection that was read to its end can be reused.
            await call.wait_thread_ended()
        rest, completion = reader.finish()
        for piece in rest:
            await out(piece)
        usage = reader.usage
        if usage is None and reader.cut:
            self._log.debug("cut at a stop string of white space; tokens are estimated", model=self.model)
        elif usage is None:
            self._log.warning("no usage reported; tokens are estimated", model=self.model)
        else:
            if not any(one.parts for one in sent):  # tokens of images are not tokens of the texts
                self._counter.learn(self.model, sent, usage.input_tokens)
            self._log.debug(
                "answered",
                latency_ms=usage.latency_ms,
                cache_read_tokens=usage.cache_read_tokens,
                cache_write_tokens=usage.cache_write_tokens,
            )
        return completion

    def _thread_ended(self, call: EventBatches, thread: asyncio.Future[None]) -> None:
        if thread.cancelled():  # stopped before it began
            call.end(BackendFailure(FailureKind.BACKEND_UNAVAILABLE, f"{self.name} is stopped"))
        self._calls.discard(call)
        self._lanes.leave()


async def _send_whole(limit: asyncio.Timeout, out: DeltaSink, piece: Delta) -> None:
    """Send a piece; a limit that passes meanwhile ends the call afterwards.

    The answer may be resumed after such a failure, and would lack a piece whose sending was cancelled.
    """
    ends_at = limit.when()
    limit.reschedule(None)
    await out(piece)
    limit.reschedule(ends_at)
    if ends_at is not None and ends_at <= asyncio.get_running_loop().time():
        await asyncio.sleep(0)  # the limit cancels it


class _InvokingBackend(BedrockBackend):
    """A model that is called by InvokeModel: Bedrock refuses to generate with it."""

    generates = False

    async def _invoked(self, request: Mapping[str, Any]) -> InvokedModel:
        async with self._call(request) as call:
            over = False
            while not over:
                events, over = await call.take()
                for event in events:
                    if isinstance(event, InvokedModel):
                        await call.wait_thread_ended()
                        return event
        raise BackendFailure(FailureKind.STREAM_BROKEN, f"{self.name} gave no answer")


class BedrockReranker(_InvokingBackend):
    """Implements :class:`gateway.backends.port.Ranks` too."""

    async def score(self, part: ScoreRequest) -> ScoreAnswer:
        request = rerank_request(part)
        async with self._in_time():
            return scores_of(await self._invoked(request), part)


class BedrockEmbeddings(_InvokingBackend):
    """Implements :class:`gateway.backends.port.Embeds` too."""

    async def embed(self, part: EmbeddingsRequest) -> EmbeddingsAnswer:
        """The vectors. The calls of a part follow each other; parts of a request run at the same time."""
        family = family_of(self.model)
        if family is None:
            raise invalid_input(f"{self.model} makes no embeddings", "model")
        vectors: list[str] = []
        tokens = 0
        async with self._in_time():
            for request in family.requests(part):
                made, used = family.vectors(await self._invoked(request))
                vectors += made
                tokens += used
        return EmbeddingsAnswer(part.model, vectors, tokens or part.tokens)
