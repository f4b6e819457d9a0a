"""The gateway's side of the engine: starts the child process, submits requests, receives outputs.

Everything runs on the event loop without blocking it: the outputs of an arriving frame are put into the
mailboxes of the open tickets, and a ticket's ``receive`` returns all outputs in its mailbox.
"""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from enum import StrEnum
from itertools import count
from types import MappingProxyType
from typing import Self

from engine import wire
from engine.errors import (
    DuplicateSequence,
    EngineBusy,
    EngineDead,
    EngineError,
    EngineKilled,
    EngineStartError,
    RequestedAdapterMissing,
    error_from_code,
)
from engine.limits import check_request
from engine.own_modules import with_own_modules
from engine.values import EngineConfig, EngineInfo, EngineSignals, GenerationRequest, SequenceOutput, coalesce

# Most bytes of commands that the child has not read. The child reads between steps, so this is many times
# what arrives during one step.
MAX_UNSENT_BYTES = 64 * 1024 * 1024


class EngineState(StrEnum):
    """new → starting → ready → stopped; dead when the process ended without ``stop``."""

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"
    STOPPED = "stopped"


class EngineTicket:
    """One request in flight, as a context manager: an exit before the last output aborts the request."""

    def __init__(self, request: GenerationRequest, wire_id: str, client: "EngineClient") -> None:
        self.request_id = request.request_id
        self.wire_id = wire_id
        self.for_adapter = request.adapter_id is not None
        self._client = client
        self._mailbox: list[SequenceOutput] = []
        self._waiter: asyncio.Future[None] | None = None
        self._closed: EngineError | None = None
        # Prompt tokens that are not computed yet; 0 after the first output.
        self.pending_tokens = len(request.prompt_token_ids) + len(request.partial_token_ids)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def abort(self) -> None:
        """Abort the request, if it has not ended; the command is sent before this returns."""
        self._client._release(self)

    async def receive(self) -> SequenceOutput:
        """Wait for output and return all of it, joined into one. Must not be called by two tasks at once, nor
        after the output with a ``finish_reason``.

        Raises EngineDead when the engine has died and all earlier output has been received.
        """
        [(_, output)] = await receive_any((self,))
        return output

    @property
    def _has_news(self) -> bool:
        return bool(self._mailbox) or self._closed is not None

    def _take(self) -> SequenceOutput:
        if self._mailbox:
            outputs, self._mailbox = self._mailbox, []
            return coalesce(self.request_id, outputs)
        raise self._closed or EngineError("the ticket has no more output")

    def _deliver(self, output: SequenceOutput) -> None:
        self._mailbox.append(output)
        self._wake()

    def _close(self, reason: EngineError) -> None:
        self._closed = reason
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def receive_any(tickets: Collection[EngineTicket]) -> list[tuple[EngineTicket, SequenceOutput]]:
    """Wait until at least one of ``tickets`` has output; return each such ticket with all of its output."""
    if not any(ticket._has_news for ticket in tickets):
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for ticket in tickets:
            ticket._waiter = news
        try:
            await news
        finally:
            for ticket in tickets:
                ticket._waiter = None
    return [(ticket, ticket._take()) for ticket in tickets if ticket._has_news]


class EngineClient(asyncio.Protocol):
    """An engine in a child process, and the protocol of the connection to it.

    ``on_signals`` is called after every step, ``on_death`` once if the process ends without ``stop``; both
    are called on the event loop and must not block.
    """

    child_module = "engine.process"

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_signals: Callable[[EngineSignals], None] | None = None,
        on_death: Callable[[EngineDead], None] | None = None,
    ) -> None:
        self.config = config
        self._on_signals = on_signals
        self._on_death = on_death
        self.state = EngineState.NEW
        # The loaded model, and the state after the last step.
        self.info: EngineInfo | None = None
        self.signals: EngineSignals | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._reader = wire.FrameReader(wire.Event)
        self._started: asyncio.Future[EngineInfo] | None = None
        # Why the engine ended; empty while it runs, or when no reason is known.
        self.death = ""
        self._by_wire_id: dict[str, EngineTicket] = {}
        self._request_ids: set[str] = set()
        self._adapters: dict[str, str] = {}
        # The loaded adapters: id and the folder that each was loaded from.
        self.adapters: Mapping[str, str] = MappingProxyType(self._adapters)
        self._adapter_calls: dict[int, tuple[wire.AdapterCommand, asyncio.Future[None]]] = {}
        self._calls = count()
        self._submitted = 0
        # Prompt tokens that are not computed yet, and those of them for adapters.
        self.pending_tokens = self.pending_adapter_tokens = 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The child's exit code, negative for a signal; None while it runs."""
        return None if self._process is None else self._process.returncode

    @property
    def is_loading_adapters(self) -> bool:
        return bool(self._adapter_calls)

    @property
    def in_flight(self) -> int:
        """Number of submitted requests that have not ended."""
        return len(self._by_wire_id)

    async def start(self) -> EngineInfo:
        """Start the process and load the model. Raises EngineStartError; after that, or when cancelled, no
        process is left.
        """
        if self.state is not EngineState.NEW:
            raise EngineStartError(f"an engine is started once; this one is {self.state.value}")
        self.state = EngineState.STARTING
        try:
            self._started = asyncio.get_running_loop().create_future()
            await self._spawn()
            self._send(wire.StartEngine(self.config))
            self.info = await self._started
        except BaseException as error:
            self.state = EngineState.STOPPED
            silent = isinstance(error, EngineKilled)  # its exit code tells whether it was
            await self._end_process(timeout_s=1.0 if silent else 0.0)
            if silent and self.exit_code != -signal.SIGKILL:
                raise EngineStartError(str(error)) from None
            raise
        self.state = EngineState.READY
        return self.info

    def submit(self, request: GenerationRequest) -> EngineTicket:
        """Send a request to the engine. Raises EngineDead, or a RequestRefused with the reason."""
        if self.state is not EngineState.READY or self.info is None or self._transport is None:
            raise self._not_ready()
        if request.request_id in self._request_ids:
            raise DuplicateSequence(f"request {request.request_id!r} is in flight")
        if (
            len(self._by_wire_id) >= self.info.max_requests
            or self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES
        ):
            raise EngineBusy(f"{len(self._by_wire_id)} requests are in flight")
        check_request(request, self.info)
        if request.adapter_id is not None and request.adapter_id not in self._adapters:
            raise RequestedAdapterMissing(f"adapter {request.adapter_id!r} is not loaded")
        # The id on the wire is never used twice, so late output of an aborted request cannot reach a new one.
        self._submitted += 1
        ticket = EngineTicket(request, f"{self._submitted}:{request.request_id}", self)
        self.pending_tokens += ticket.pending_tokens
        if ticket.for_adapter:
            self.pending_adapter_tokens += ticket.pending_tokens
        self._by_wire_id[ticket.wire_id] = ticket
        self._request_ids.add(request.request_id)
        self._send(wire.Add(replace(request, request_id=ticket.wire_id)))
        return ticket

    async def load_adapter(self, adapter_id: str, path: str) -> None:
        """Load a LoRA adapter from a folder while requests run; it replaces one with the same id. Earlier
        requests finish with the weights they started with.

        Raises EngineDead, or an EngineAdapterError, and then nothing has changed. When the caller is
        cancelled, the load continues; ``adapters`` has the adapter when it is done.
        """
        await self._call(wire.AdapterCommand(next(self._calls), adapter_id, path))

    async def unload_adapter(self, adapter_id: str) -> None:
        """Unload an adapter: no new request may name it, and its weights are freed after the last request
        that uses them. Raises AdapterNotLoaded or EngineDead.
        """
        await self._call(wire.AdapterCommand(next(self._calls), adapter_id))

    async def stop(self, timeout_s: float = 5.0) -> None:
        """End the process, by force after ``timeout_s``. Open tickets raise EngineDead."""
        if self.state is not EngineState.DEAD:
            self.state = EngineState.STOPPED
        self._close_tickets("the engine was stopped")
        await self._end_process(timeout_s)

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    self.child_module,
                    str(theirs.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=_child_environment(),
                )
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_unix_connection(lambda: self, sock=ours)

    async def _end_process(self, timeout_s: float) -> None:
        if self._transport is not None:
            self._transport.close()
        if self._process is None:
            return
        try:
            await asyncio.wait_for(self._process.wait(), timeout_s)
        except TimeoutError:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()

    async def _call(self, command: wire.AdapterCommand) -> None:
        if self.state is not EngineState.READY:
            raise self._not_ready()
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._adapter_calls[command.call] = command, settled
        self._send(command)
        await settled

    def _not_ready(self) -> EngineDead:
        return EngineDead(self.death or f"the engine is {self.state.value}")

    def _send(self, command: wire.Command) -> None:
        if self._transport is not None:
            self._transport.write(wire.encode(command))

    def _release(self, ticket: EngineTicket) -> None:
        if self._by_wire_id.pop(ticket.wire_id, None) is None:
            return
        self._prefilled(ticket)
        self._request_ids.discard(ticket.request_id)
        self._send(wire.Abort(ticket.wire_id))
        ticket._close(EngineError("the ticket was left"))

    def data_received(self, data: bytes) -> None:
        for event in self._reader.feed(data):
            self._receive(event)

    def _receive(self, event: wire.Event) -> None:
        if isinstance(event, wire.StepOutputs):
            for output in event.outputs:
                self._deliver(output)
            self.signals = event.signals
            if self._on_signals is not None:
                self._on_signals(event.signals)
        elif isinstance(event, wire.AdapterSettled):
            self._settle(event)
        elif isinstance(event, wire.Died):
            self.death = f"the engine failed: {event.message}"
        elif self._started is not None and not self._started.done():
            if isinstance(event, wire.Started):
                self._started.set_result(event.info)
            else:
                self._started.set_exception(error_from_code(event.code, event.message))

    def _settle(self, event: wire.AdapterSettled) -> None:
        command, settled = self._adapter_calls.pop(event.call)
        if event.code is None and command.path is not None:
            self._adapters[command.adapter_id] = command.path
        elif event.code is None:
            self._adapters.pop(command.adapter_id, None)
        if settled.done():
            return  # cancelled
        if event.code is None:
            settled.set_result(None)
        else:
            settled.set_exception(error_from_code(event.code, event.message))

    def _deliver(self, output: SequenceOutput) -> None:
        ticket = self._by_wire_id.get(output.request_id)
        if ticket is None:
            return  # aborted while the step ran
        self._prefilled(ticket)
        if output.finish_reason is not None:
            del self._by_wire_id[ticket.wire_id]
            self._request_ids.discard(ticket.request_id)
        ticket._deliver(output)

    def _prefilled(self, ticket: EngineTicket) -> None:
        """Stop counting the prompt tokens of a request that is computed or aborted."""
        self.pending_tokens -= ticket.pending_tokens
        if ticket.for_adapter:
            self.pending_adapter_tokens -= ticket.pending_tokens
        ticket.pending_tokens = 0

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None and not self.death:
            self.death = f"the connection to the engine failed: {error}"
        if self.state is EngineState.STARTING and self._started is not None and not self._started.done():
            message = self.death or "the engine process ended while it started; its log says why"
            self._started.set_exception(EngineKilled(message))
        if self.state is not EngineState.READY:
            return
        self.state = EngineState.DEAD
        self.death = self.death or "the engine process ended unexpectedly"
        self._close_tickets(self.death)
        if self._on_death is not None:
            self._on_death(EngineDead(self.death))

    def _close_tickets(self, message: str) -> None:
        tickets = list(self._by_wire_id.values())
        self._by_wire_id.clear()
        self._request_ids.clear()
        for ticket in tickets:
            ticket._close(EngineDead(message))
        calls = list(self._adapter_calls.values())
        self._adapter_calls.clear()
        self._adapters.clear()
        for _, settled in calls:
            if not settled.done():
                settled.set_exception(EngineDead(message))


def _child_environment() -> dict[str, str]:
    """The child's environment: this process's, the path of the package ``engine``, and tuning defaults.

    OpenMP's threads spin for some 40 µs and then sleep. On two busy cores, waiting for a thread that is not
    scheduled took 10 ms a step with spinning and 2 ms with sleeping; one stream got 240 tokens a second with
    threads that sleep at once, 350 with threads that spin first. glibc's allocator keeps the memory of a
    step's tensors, because returning it caused page faults that took a tenth of a prefill step, and uses huge
    pages, which took a twentieth off a decode step.
    """
    defaults = {
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "3000",
        "TOKENIZERS_PARALLELISM": "false",
        "MALLOC_MMAP_THRESHOLD_": str(256 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(512 << 20),
        "MALLOC_TOP_PAD_": str(64 << 20),
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }
    return with_own_modules({**defaults, **os.environ})
