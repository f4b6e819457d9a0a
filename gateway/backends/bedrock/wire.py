"""The connection of one call, as something that another thread may cut."""

from __future__ import annotations

import contextlib
import socket
import threading


class WireCut(Exception):
    """The call was given up; nothing more is to be sent or read."""


class Wire:
    """Holds the socket that a call uses at the moment.

    A thread that waits in a read cannot be ended from outside; shutting its socket down ends the read. It is
    shut down and not closed: its number must not go to another connection while a thread still reads from it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._cut = False

    @property
    def is_cut(self) -> bool:
        """Whether the call was given up."""
        return self._cut

    def hold(self, sock: socket.socket) -> None:
        """The call is about to use this socket.

        Raises:
            WireCut: the call was given up meanwhile.
        """
        with self._lock:
            if self._cut:
                raise WireCut
            self._socket = sock

    def release(self) -> None:
        """The call is over; its connection may serve another one."""
        with self._lock:
            self._socket = None

    def cut(self) -> None:
        """Give the call up, from any thread. Never waits."""
        with self._lock:
            self._cut = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    # Past the TLS layer, whose own shutdown would take the session from under the reader.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
