"""The engine's process: reads commands, steps while there is work, sends one frame per step.

``engine.client`` starts it as ``python -m engine.process FD`` with one end of a socket pair. It ends when the
other end is closed, so it never outlives its parent.
"""

import json
import logging
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TextIO

from engine import wire
from engine.adapter_commands import AdapterCommands
from engine.errors import EngineStartError, RequestRefused
from engine.values import GenerationRequest, SamplingParams, SequenceEnd, SequenceOutput


class JsonLines(logging.Formatter):
    """One JSON object per line, with the gateway's field names. Exceptions are logged as type and place only,
    because their messages may quote a caller's text.
    """

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "event": record.getMessage(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": "engine",
            "timestamp": datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        }
        if record.exc_info is not None and record.exc_info[1] is not None:
            line["exception"] = _described(record.exc_info[1])
        return json.dumps(line)


LOG_LEVEL_VARIABLE = "SLUICE_LOG_LEVEL"  # the log level of the gateway, which starts the engine


def log_to(stream: TextIO) -> None:
    """Write this process's log to ``stream``, at the gateway's level."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        logging.Formatter("%(asctime)s engine %(levelname)s %(message)s") if stream.isatty() else JsonLines()
    )
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(os.environ.get(LOG_LEVEL_VARIABLE, "info").upper())


def _described(error: BaseException) -> str:
    frames = reversed(traceback.extract_tb(error.__traceback__))
    places = " < ".join(f"{frame.name} ({frame.filename}:{frame.lineno})" for frame in frames)
    return f"{type(error).__name__} at {places}"


if TYPE_CHECKING:
    from engine.engine import Engine

_READ_BYTES = 1 << 20
# Interval in which an engine without requests checks whether an adapter has been read.
ADAPTER_POLL_S = 0.005
_log = logging.getLogger(__name__)


class Channel:
    """The child's end of the socket. Sending blocks: if the parent does not read, the child can wait."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        # Unlike ``select``, for any descriptor: this one has the number that it had in the parent.
        self._arrived = select.poll()
        self._arrived.register(connection, select.POLLIN)
        self._reader = wire.FrameReader(wire.Command)

    def receive(self, wait_s: float | None) -> list[wire.Command] | None:
        """The commands that arrive within ``wait_s`` (None: wait for at least one, without a limit). None
        when the parent closed its end.
        """
        commands: list[wire.Command] = []
        while not commands:
            if wait_s is not None and not self._arrived.poll(wait_s * 1000):
                break
            data = self._socket.recv(_READ_BYTES)
            if not data:
                return None
            commands.extend(self._reader.feed(data))
        return commands

    def send(self, event: wire.Event) -> None:
        """Send a frame. Raises ConnectionError when the parent has ended."""
        self._socket.sendall(wire.encode(event))


def serve(engine: "Engine", channel: Channel) -> None:
    """Execute commands and step until the parent closes its end."""
    adapter_commands = AdapterCommands(engine)
    while (commands := channel.receive(_command_wait_s(engine, adapter_commands))) is not None:
        outputs = [
            output
            for command in commands
            if (output := _apply(engine, adapter_commands, command)) is not None
        ]
        for settled in adapter_commands.settle():
            channel.send(settled)
        if engine.has_work:
            outputs += engine.step()
        channel.send(wire.StepOutputs(tuple(outputs), engine.signals))


def _command_wait_s(engine: "Engine", adapter_commands: AdapterCommands) -> float | None:
    """How long to wait for a command: 0 if there is work, None (no limit) if there is none."""
    if engine.has_work:
        return 0.0
    return ADAPTER_POLL_S if adapter_commands.is_busy else None


def _apply(
    engine: "Engine", adapter_commands: AdapterCommands, command: wire.Command
) -> SequenceOutput | None:
    """Execute one command; returns an error output for a refused request."""
    if isinstance(command, wire.AdapterCommand):
        adapter_commands.take(command)
    elif isinstance(command, wire.Abort):
        engine.abort(command.request_id)
    elif isinstance(command, wire.Add):
        try:
            engine.add(command.request)
        except RequestRefused as error:
            _log.warning("refused %s: %s", command.request.request_id, error)
            return SequenceOutput(
                command.request.request_id,
                "",
                (),
                SequenceEnd.ERROR,
                error=error.code,
                detail=str(error),
            )
    return None


def _load(command: wire.Command) -> "Engine":
    if not isinstance(command, wire.StartEngine):
        raise EngineStartError(f"the first command was {type(command).__name__}, not StartEngine")
    try:
        from engine.build import build_engine
    except ImportError as error:
        raise EngineStartError(
            f"the embedded engine needs PyTorch: install sluice-gateway[embedded] ({error})"
        ) from error
    engine = build_engine(command.config)
    _warm_up(engine)
    return engine


def _warm_up(engine: "Engine") -> None:
    """Generate at most two tokens, so that the first request does not wait for the set-up of libraries."""
    engine.add(GenerationRequest("warm-up", (0,), SamplingParams(max_tokens=2, temperature=0.0)))
    while engine.has_work:
        engine.step()


def main(argv: list[str], load: Callable[[wire.Command], "Engine"] = _load) -> int:
    """Serve on the socket whose file descriptor is the only argument; returns the exit status."""
    # Ctrl-C, a closed terminal and a service manager's SIGTERM reach every process of the tree: the parent
    # drains, then closes the socket.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    log_to(sys.stderr)
    channel = Channel(socket.socket(fileno=int(argv[0])))
    try:
        commands = channel.receive(None)
        if commands is None:
            return 0
        try:
            engine = load(commands[0])
        except EngineStartError as error:
            channel.send(wire.StartFailed(error.code, str(error)))
            return 1
        channel.send(wire.Started(engine.info))
        serve(engine, channel)
    except ConnectionError:
        _log.info("the parent has gone")
    except Exception as error:
        _log.exception("the engine failed")
        channel.send(wire.Died(f"{type(error).__name__}: {error}"))
        return 1
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    logging.shutdown()
    os._exit(status)  # no cleanup is needed, and the teardown of torch takes a second on a busy machine
