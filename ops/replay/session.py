"""Runs one replay, from its options to its figures."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from ops.replay.calibrate import calibrate
from ops.replay.contract import Native, OpenAI, ReplayContract
from ops.replay.load import ReplayRun, run_load
from ops.replay.options import ContractName, Options
from ops.replay.report import ReplayReport
from ops.replay.shape import Planned, plan
from ops.replay.target import NO_FALLBACK, ReplayTarget
from ops.replay.text import Lexicon, TextMaker
from ops.replay.trace import Trace, read_trace

Watch = Callable[[ReplayRun, int], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class Replayed:
    """A replay that has ended.

    Args:
        lexicon: the token counts of words, measured with the gateway.
        max_model_len: the limit to which lengths were clamped.
        below_overhead: number of prompts that in the trace are not longer than the overhead of every prompt
            of this contract; they are sent with one word.
    """

    trace: Trace
    lexicon: Lexicon
    max_model_len: int
    report: ReplayReport
    below_overhead: int = 0

    def setup(self, options: Options) -> dict[str, object]:
        """The trace, options and calibration for the JSON report, without the key."""
        lexicon = self.lexicon
        asked = {
            name: value for name, value in asdict(options).items() if name not in ("trace", "key", "slo")
        }
        return {
            "trace": {
                "path": self.trace.path,
                "format": self.trace.format,
                "rows": len(self.trace.arrivals),
                "span_s": self.trace.span_s,
            },
            "options": {**asked, "max_model_len": self.max_model_len},
            "calibration": {
                "calibrated": lexicon.calibrated,
                "prompt_overhead_tokens": lexicon.overhead,
                "prompts_below_overhead": self.below_overhead,
            },
        }


async def replay_trace(
    options: Options,
    *,
    stop: asyncio.Event | None = None,
    watch: Watch = lambda run, total: nullcontext(),
) -> Replayed:
    """Read the trace, calibrate, send all requests, and return the result.

    Args:
        stop: an event that ends the replay early; the figures so far are returned.
        watch: a context manager around the load; gets the live run and the number of requests.

    Raises ReplayError: the trace, an option or the gateway does not allow a start.
    """
    trace = await asyncio.to_thread(read_trace, options.trace, limit=options.limit, skip=options.skip)
    run = ReplayRun()
    async with _target(options) as target:
        contract, lexicon, longest, requests = await _planned(options, target, trace)
        maker = TextMaker(lexicon, options.seed)
        with watch(run, len(requests)):
            await run_load(
                requests,
                text=maker.prompt,
                send=partial(target.generate, contract),
                concurrency=options.concurrency,
                clock=time.monotonic,
                stop=stop if stop is not None else asyncio.Event(),
                run=run,
            )
    clamped = sum(planned.clamped for planned in requests)
    below = sum(planned.prompt_tokens <= lexicon.overhead for planned in requests)
    return Replayed(trace, lexicon, longest, ReplayReport(run, options.slo, clamped), below)


async def write_batch(options: Options, out: Path) -> tuple[int, int]:
    """Write the trace's requests as the input file of a batch; returns their number, and that of cut ones.

    Raises ReplayError: the trace, an option or the gateway does not allow it.
    """
    trace = await asyncio.to_thread(read_trace, options.trace, limit=options.limit, skip=options.skip)
    async with _target(options) as target:
        contract, lexicon, _, requests = await _planned(options, target, trace)
    maker = TextMaker(lexicon, options.seed)

    def write() -> None:
        with out.open("w") as file:
            for one in requests:
                body = contract.body(maker.prompt(one), one.max_tokens)
                whole = {name: value for name, value in body.items() if not name.startswith("stream")}
                line = {"custom_id": f"r{one.index}", "method": "POST", "url": contract.path, "body": whole}
                file.write(json.dumps(line) + "\n")

    await asyncio.to_thread(write)
    return len(requests), sum(one.clamped for one in requests)


def _target(options: Options) -> ReplayTarget:
    return ReplayTarget(
        options.url,
        key=options.key,
        timeout_s=options.timeout_s,
        headers=NO_FALLBACK if options.no_fallback else {},
        clock=time.monotonic,
    )


async def _planned(
    options: Options, target: ReplayTarget, trace: Trace
) -> tuple[ReplayContract, Lexicon, int, Sequence[Planned]]:
    """The contract, the measured token counts, the longest sequence, and the requests to send."""
    contract: ReplayContract = Native(options.route)
    if options.contract is ContractName.OPENAI:
        contract = OpenAI(options.model or await target.first_model(), options.route)
    lexicon, longest = await calibrate(target, contract)
    longest = options.max_model_len or longest
    requests = plan(trace, speed=options.speed, scale_tokens=options.scale_tokens, max_model_len=longest)
    return contract, lexicon, longest, tuple(requests)
