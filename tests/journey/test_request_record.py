"""The recorder of a request: no stage of the journey reads from it; its trace is sent if it was slow."""

from __future__ import annotations

import inspect
import time
import typing
from collections.abc import Callable
from dataclasses import replace

from gateway.contracts.values import GenerateRequest
from gateway.requests.request_record import RequestRecorder
from gateway.wiring.batches import of_lines
from observability.trace_facts import TraceFigures
from observability.tracing import Tracing
from tests.journey.rig import JourneyRig


def test_the_recorder_only_listens() -> None:
    public = {name: value for name, value in vars(RequestRecorder).items() if not name.startswith("_")}
    assert public, "it listens to something"
    for name, method in public.items():
        assert inspect.isfunction(method), f"{name} can be read"
        assert typing.get_type_hints(method)["return"] is type(None), f"{name} returns a value"


class Sender:
    """A sender of traces that counts them."""

    figures = TraceFigures()

    def __init__(self) -> None:
        self.offered = 0

    def offer(self, *_: object) -> None:
        self.offered += 1


async def test_a_slow_requests_trace_is_sent_and_not_that_of_a_slow_line_of_a_batch(
    build_rig: Callable[..., JourneyRig], ask: Callable[..., GenerateRequest]
) -> None:
    rig, sender = build_rig(), Sender()
    tracing = Tracing(sender, sample_ratio=0.0)  # type: ignore[arg-type]
    reporter = replace(rig.journey.reporter, tracing=tracing)
    for one, offered in ((of_lines(reporter), 0), (reporter, 1)):
        slow = replace(rig, journey=replace(rig.journey, reporter=one))
        await slow.run(ask(arrived_at=time.monotonic() - 2.0))
        assert (rig.records[-1].status, sender.offered) == (200, offered)
