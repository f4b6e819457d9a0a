"""Helpers: work for a Bedrock backend, its failures, and waits."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from benchmarks.bedrock.stand_in import StandIn
from budgeting.values import Message, Role
from gateway.backends.bedrock.backend import BedrockBackend
from gateway.backends.port import Work
from gateway.contracts.values import Sampling
from resilience.failures import BackendFailure
from tests.conformance.harness import collect

_numbers = itertools.count()
SYSTEM, USER, ASSISTANT = Role.SYSTEM, Role.USER, Role.ASSISTANT


def work(*messages: Message, **sampling: Any) -> Work:
    turns = messages or (Message(USER, "Something like Vinland Saga?"),)
    return Work(f"gen_{next(_numbers)}", (1, 2, 3), tuple(turns), Sampling(**{"max_tokens": 64, **sampling}))


async def failure_of(backend: BedrockBackend, asked: Work | None = None) -> BackendFailure:
    with pytest.raises(BackendFailure) as caught:
        await collect(backend, asked or work())
    return caught.value


async def until(true: Callable[[], bool], within_s: float = 30.0) -> None:
    """Wait until ``true()``; fail after ``within_s``."""
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end, "it did not come to be"
        await asyncio.sleep(0.01)


async def wait_idle(backend: BedrockBackend, bedrock: StandIn | None = None, within_s: float = 30.0) -> None:
    """Wait until the backend has no call and the stand-in, when given, no open connection."""
    until = time.monotonic() + within_s
    while backend.load.running or backend.load.waiting or (bedrock and bedrock.open_connections):
        assert time.monotonic() < until, f"{backend.load}, {bedrock and bedrock.open_connections} connections"
        await asyncio.sleep(0.01)


def threads_of(backend: BedrockBackend) -> int:
    prefix = f"bedrock-{backend.name}_"
    return sum(thread.name.startswith(prefix) for thread in threading.enumerate())


def texts(turn: dict[str, Any]) -> Sequence[str]:
    return [block["text"] for block in turn["content"]]
