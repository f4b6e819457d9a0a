"""Finds free ports on loopback, for child processes."""

import contextlib
import socket


def free_ports(count: int) -> list[int]:
    """``count`` distinct free ports: each stays bound until all are found."""
    with contextlib.ExitStack() as held:
        found = []
        for _ in range(count):
            one = held.enter_context(socket.socket())
            one.bind(("127.0.0.1", 0))
            found.append(int(one.getsockname()[1]))
        return found
