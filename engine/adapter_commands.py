"""Loads adapters while the engine steps: a thread reads the files; ``settle`` installs them between steps."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import EngineAdapterError, NoAdapterRoom
from engine.wire import AdapterCommand, AdapterSettled

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.lora import LoraWeights

MAX_PENDING = 64


class AdapterCommands:
    """Executes adapter commands in the order of their arrival."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapter-reader")
        self._pending: deque[tuple[AdapterCommand, Future[LoraWeights | None]]] = deque()
        self._refused: list[AdapterSettled] = []

    @property
    def is_busy(self) -> bool:
        """True while a command has not been answered."""
        return bool(self._pending or self._refused)

    def take(self, command: AdapterCommand) -> None:
        """Queue a command and start to read its files; refuse it if too many are pending."""
        if len(self._pending) < MAX_PENDING:
            self._pending.append((command, self._reader.submit(self._read, command)))
        else:
            error = NoAdapterRoom(f"{MAX_PENDING} adapters wait already to be loaded or unloaded")
            self._refused.append(_settled(command, error))

    def settle(self) -> Iterator[AdapterSettled]:
        """Carry out the commands whose files have been read; yield the answers. Called between steps."""
        yield from self._refused
        self._refused.clear()
        while self._pending and self._pending[0][1].done():
            command, reading = self._pending.popleft()
            try:
                if (weights := reading.result()) is not None:
                    self._engine.install_adapter(command.adapter_id, weights)
                else:
                    self._engine.remove_adapter(command.adapter_id)
            except EngineAdapterError as error:
                yield _settled(command, error)
            else:
                yield _settled(command)

    def _read(self, command: AdapterCommand) -> "LoraWeights | None":
        return None if command.path is None else self._engine.read_adapter(Path(command.path))


def _settled(command: AdapterCommand, error: EngineAdapterError | None = None) -> AdapterSettled:
    return AdapterSettled(command.call, error.code if error else None, str(error or ""))
