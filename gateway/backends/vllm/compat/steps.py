"""Handles the outputs of vLLM's core, step by step."""

import asyncio
from collections.abc import Callable
from typing import Any

from msgspec import Struct, defstruct, field, msgpack
from msgspec.structs import astuple

from gateway.backends.vllm.compat.answer import Outputs
from gateway.backends.vllm.compat.signals import SignalBoard


class _PrefixFigures(Struct, frozen=True):
    queries: int = 0
    hits: int = 0


class _SchedulerFigures(Struct):
    """The fields of vLLM's ``SchedulerStats`` that :class:`SignalBoard` reads."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_stats: _PrefixFigures = _PrefixFigures()
    waiting_lora_adapters: dict[str, int] = {}
    running_lora_adapters: dict[str, int] = {}


class _StepQueue(asyncio.Queue[Any]):
    """The steps that vLLM's own task handles; ``steps`` is busy until it has handled all of them."""

    def __init__(self, steps: "CoreSteps") -> None:
        super().__init__()
        self._steps = steps

    def put_nowait(self, item: Any) -> None:
        self._steps.busy = True
        super().put_nowait(item)

    async def get(self) -> Any:
        if self._steps.busy and self.empty():
            self._steps.busy = False
            self._steps.resume()
        return await super().get()


class CoreSteps:
    """Passes the text of an answer on in the callback that receives its token.

    vLLM's own path wakes two tasks for each step and makes two objects for each token. It still handles
    everything else: an answer's first and last tokens, preemptions, log-probabilities, stop strings, several
    choices, and what the caller reads too slowly. Its state of a request is kept as it would keep it. If
    vLLM's types are not those expected, its own path handles all.

    ``busy``: vLLM's task handles an earlier step, which no later one may overtake; ``resume`` is called when
    it has. ``board`` takes the figures.
    """

    def __init__(self, llm: Any, board: SignalBoard) -> None:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
        from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer

        client = llm.engine_core
        self._processor = llm.output_processor
        self._detokenizer = BaseIncrementalDetokenizer
        self._decode_whole = client.decoder.decode
        # Decodes what is read of most messages: vLLM's own type of the figures has some 20 fields.
        fields: list[tuple[str, Any, Any]] = [
            ("engine_index", int, 0),
            ("outputs", list[EngineCoreOutput], field(default_factory=list)),
            ("scheduler_stats", _SchedulerFigures | None, None),
            ("timestamp", float, 0.0),
            ("utility_output", Any, None),
        ]
        step: Any = defstruct("Step", fields, array_like=True)
        hooks = client.decoder
        self._decode = msgpack.Decoder(step, ext_hook=hooks.ext_hook, dec_hook=hooks.dec_hook).decode
        self._board = board
        self._queue: _StepQueue | None = None
        self.busy = False
        self.resume: Callable[[], None] = lambda: None
        self._streams: dict[str, Outputs] = {}
        # Answers whose text waits until the messages that have arrived meanwhile are read.
        self._held: list[Outputs] = []
        # The fields of an output that has tokens alone, after these two.
        self._plain = astuple(EngineCoreOutput("", []))[2:]
        expected = (
            EngineCoreOutput.__struct_fields__[:2] == ("request_id", "new_token_ids")
            and EngineCoreOutputs.__struct_fields__[: len(fields)] == tuple(name for name, _, _ in fields)
            and hasattr(BaseIncrementalDetokenizer, "decode_next")
            and client.outputs_queue.__class__ is asyncio.Queue
            # Several engines: vLLM's client follows their waves.
            and not hasattr(client, "process_engine_outputs")
        )
        if expected:
            self._queue = client.outputs_queue = _StepQueue(self)
        self._is_late = False

    def up_to_date(self) -> bool:
        """Whether no outputs of further steps wait to be read."""
        return not self._is_late

    def add(self, outputs: Outputs) -> None:
        """Pass the answer on from here, if vLLM's state of its request allows it."""
        state = self._processor.request_states.get(outputs.request_id)
        detokenizer = getattr(state, "detokenizer", None)
        if (
            self._queue is not None
            and isinstance(detokenizer, self._detokenizer)
            and not detokenizer.stop
            and state.parent_req is None
            and state.stream_interval == 1
            and not state.streaming_input
        ):
            outputs.state = state
            self._streams[outputs.request_id] = outputs

    def remove(self, outputs: Outputs) -> None:
        self._streams.pop(outputs.request_id, None)
        outputs.detach()

    def take(self, frames: Any, more: bool) -> bool:
        """Handle a message; returns False if vLLM must.

        With ``more``, text is held and joined to that of the next step: a process that cannot keep up with
        its engine sends fewer, longer pieces.
        """
        self._is_late = more
        queue = self._queue
        if queue is None:
            return False
        step = None
        if len(frames) == 1:  # others have arrays
            try:
                step = self._decode(frames[0].buffer)
            except Exception:
                step = None  # as an engine's last message, which is no step
        if step is None or step.utility_output is not None:
            self._flush()
            return False
        try:
            self._handle(step, frames, queue, more)
        except Exception as error:
            queue.put_nowait(error)  # as vLLM does: its task fails all requests, and ends
        return True

    def _handle(self, step: Any, frames: Any, queue: _StepQueue, more: bool) -> None:
        left, count = self._pass_on(step, more or bool(self._held))
        if self._held and (left or not more):
            self._flush()
        board, stats = self._board, step.scheduler_stats
        if count:
            board.decoded(count)
        if left:
            whole = self._decode_whole(frames)
            whole.outputs = left
            queue.put_nowait(whole)
        elif stats is not None:
            if self._processor.lora_states.requests:
                self._processor.update_scheduler_stats(stats)
            board.scheduled(stats, step.engine_index)

    def _pass_on(self, step: Any, hold: bool) -> tuple[list[Any], int]:
        """Pass a step's texts on; returns the outputs that vLLM must handle, and the tokens of the others."""
        streams, plain, ended_at = self._streams, self._plain, step.timestamp
        left: list[Any] = []
        count = 0
        for output in step.outputs:
            outputs, ids = streams.get(output.request_id), output.new_token_ids
            if (
                outputs is None
                or outputs.taker is None
                or outputs.collector.output is not None
                or outputs.state.is_prefilling
                or not ids
            ):
                left.append(output)
                continue
            try:
                has_more = astuple(output)[2:] != plain
            except ValueError:  # an array
                has_more = True
            if has_more:
                left.append(output)
                continue
            state = outputs.state
            detokenizer, stats = state.detokenizer, state.stats
            text = ""
            for token in ids:
                detokenizer.token_ids.append(token)
                text += detokenizer.decode_next(token)
            tokens = len(ids)
            count += tokens
            if stats is not None:
                stats.num_generation_tokens += tokens
                stats.last_token_ts = ended_at
            if hold:
                if outputs.held is None:
                    self._held.append(outputs)
                    outputs.held = text, tuple(ids)
                else:
                    outputs.held = outputs.held[0] + text, outputs.held[1] + tuple(ids)
            elif not outputs.taker((text, tuple(ids))):
                outputs.stop()
        return left, count

    def _flush(self) -> None:
        held, self._held = self._held, []
        for outputs in held:
            piece, outputs.held = outputs.held, None
            if piece is not None and outputs.taker is not None and not outputs.taker(piece):
                outputs.stop()
