"""A timer in microseconds for an event loop whose own timers count milliseconds: Linux's ``timerfd``."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable

# time.h, sys/timerfd.h
_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK = 0o4000
_TFD_TIMER_ABSTIME = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Ticker:
    """Calls ``due`` on the loop at absolute times, one at a time.

    Times are seconds of CLOCK_MONOTONIC, which on Linux is also the clock of :func:`time.perf_counter`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, due: Callable[[], None]) -> None:
        self._loop = loop
        self._due = due
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed; this benchmark needs Linux")
        loop.add_reader(self._fd, self._fired)

    def at(self, when: float) -> None:
        """Fire once at ``when``; at once if that is past."""
        # Zero would disarm the timer.
        nanoseconds = max(1, round(when * 1e9))
        spec = _Itimerspec(_Timespec(0, 0), _Timespec(*divmod(nanoseconds, 1_000_000_000)))
        if self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def close(self) -> None:
        """Close the file descriptor."""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _fired(self) -> None:
        os.read(self._fd, 8)
        self._due()
