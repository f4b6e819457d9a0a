"""How the gateway receives the messages of vLLM's core."""

import asyncio
import os
from collections import deque
from typing import Any, Literal

from gateway.backends.vllm.compat.steps import CoreSteps

MOST_MESSAGES = 16  # messages received in one turn of the event loop


class Receiver:
    """Receives messages in place of a ``zmq.asyncio`` socket.

    Each step of the engine is a message. The socket needs a timer of the event loop, two futures and seven
    calls of ZMQ for each; this class needs three calls, and a future for a message that is left to vLLM.
    """

    def __init__(self, socket: Any, steps: CoreSteps) -> None:
        import zmq

        self._steps = steps
        steps.resume = self._resume
        self._socket: Any = zmq.Socket.shadow(socket)
        self._error, self._closed = zmq.ZMQError, (zmq.ENOTSOCK, zmq.ETERM)
        # Plain numbers: operators on ``zmq``'s flags are calls into ``enum``.
        self._events, self._readable, self._no_wait = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.DONTWAIT)
        # A duplicate: ZMQ closes its own descriptor in another thread; another file may then get its number.
        self._fd = os.dup(self._socket.FD)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._receive)
        self._left: deque[Any] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._next: asyncio.Handle | None = None
        self._received = 0

    async def recv_multipart(self, *, copy: Literal[False]) -> Any:
        """The next message that is left to vLLM."""
        while not self._left:
            self._waiting = self._loop.create_future()
            await self._waiting
        return self._left.popleft()

    def close(self) -> None:
        self._steps.resume = lambda: None  # no message is received any more
        self._loop.remove_reader(self._fd)
        if self._next is not None:
            self._next.cancel()
        os.close(self._fd)

    def _receive(self) -> None:
        self._received = 0
        self._resume()

    def _resume(self) -> None:
        """Receive until no message is left, or it is the turn of others."""
        socket, events, no_wait, steps = self._socket, self._events, self._no_wait, self._steps
        try:
            # Reading the events resets the signal, which may stand for several messages.
            arrived = socket.get(events) & self._readable
            while arrived and not steps.busy:
                if self._received == MOST_MESSAGES:
                    self._next = self._loop.call_soon(self._receive)
                    return
                self._received += 1
                frames = [socket.recv(no_wait, copy=False)]
                while frames[-1].more:
                    frames.append(socket.recv(no_wait, copy=False))
                arrived = socket.get(events) & self._readable
                if not steps.take(frames, bool(arrived) and self._received < MOST_MESSAGES):
                    self._left.append(frames)
                    if self._waiting is not None and not self._waiting.done():
                        self._waiting.set_result(None)
        except self._error as error:
            if error.errno not in self._closed:
                raise
            # vLLM has closed the socket, in another thread: its core is dead, and :meth:`close` comes next.
            self._loop.remove_reader(self._fd)


def receive_faster(client: Any, steps: CoreSteps) -> None:
    """Make vLLM's client receive from its core with a :class:`Receiver`; it must not receive yet."""
    resources = client.resources
    socket = resources.output_socket
    receiver = resources.output_socket = Receiver(socket, steps)
    try:
        client._ensure_output_queue_task()
    finally:
        resources.output_socket = socket
    resources.output_queue_task.add_done_callback(lambda _: receiver.close())
