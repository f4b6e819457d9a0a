"""How vLLM's client waits for the messages of its core."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Literal


class Receiver:
    """Receives messages in place of a ``zmq.asyncio`` socket.

    Each step of the engine is a message. The socket needs a timer of the event loop, two futures and seven
    calls of ZMQ for each; this class needs one future and three calls.
    """

    def __init__(self, socket: Any) -> None:
        import zmq

        self._socket: Any = zmq.Socket.shadow(socket)
        # Plain numbers: operators on ``zmq``'s flags are calls into ``enum``.
        self._events, self._readable, self._no_wait = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.DONTWAIT)
        # A duplicate: ZMQ closes its own descriptor in another thread; another file may then get its number.
        self._fd = os.dup(self._socket.FD)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._signalled)
        self._waiting: asyncio.Future[None] | None = None

    async def recv_multipart(self, *, copy: Literal[False]) -> Any:
        socket = self._socket
        # Reading the events resets the signal, which may stand for several messages.
        while not socket.get(self._events) & self._readable:
            self._waiting = self._loop.create_future()
            await self._waiting
        frames = [socket.recv(self._no_wait, copy=copy)]
        while frames[-1].more:
            frames.append(socket.recv(self._no_wait, copy=copy))
        return frames

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _signalled(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


def receive_faster(client: Any) -> None:
    """Make vLLM's client receive from its core with a :class:`Receiver`; it must not receive yet."""
    resources = client.resources
    socket = resources.output_socket
    receiver = resources.output_socket = Receiver(socket)
    try:
        client._ensure_output_queue_task()
    finally:
        resources.output_socket = socket
    resources.output_queue_task.add_done_callback(lambda _: receiver.close())
