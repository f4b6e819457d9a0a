"""Connecting by name, on the event loop that serves."""

import asyncio
import socket
from typing import Any

import pytest
import uvloop

from gateway.backends.workers.connect import connect


class Loop(uvloop.Loop):
    """An event loop whose name lookups the test answers."""

    lookup: asyncio.Future[list[Any]]

    async def getaddrinfo(self, *_: Any, **__: Any) -> list[Any]:
        self.lookup = self.create_future()
        return await self.lookup


def addresses(*hosts: str) -> list[Any]:
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in hosts]


def test_a_lookup_that_outlasts_its_caller_is_cancelled_and_its_failure_not_logged() -> None:
    async def gives_up() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await connect(asyncio.Protocol, "gpu-1.example", 8000, None, None)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Loop) and loop.lookup.cancelled()

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(gives_up())


@pytest.mark.slow
def test_the_next_address_of_a_name_is_tried_if_one_refuses() -> None:
    async def connects() -> tuple[object, object]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Loop)
        listener = socket.create_server(("127.0.0.2", 0))
        port = listener.getsockname()[1]
        peers: list[object] = []
        for hosts in (("127.0.0.1", "127.0.0.2"), ("127.0.0.2", "127.0.0.1")):
            loop.call_later(0.01, lambda found=hosts: loop.lookup.set_result(addresses(*found)))
            transport, _ = await connect(asyncio.Protocol, "gpu-1.example", port, None, None)
            peers.append(transport.get_extra_info("peername")[0])
            transport.close()
        loop.call_later(0.01, lambda: loop.lookup.set_result(addresses("127.0.0.1", "127.0.0.3")))
        with pytest.raises(ConnectionRefusedError):
            await connect(asyncio.Protocol, "gpu-1.example", port, None, None)
        listener.close()
        return peers[0], peers[1]

    with asyncio.Runner(loop_factory=Loop) as runner:
        assert runner.run(connects()) == ("127.0.0.2", "127.0.0.2")
