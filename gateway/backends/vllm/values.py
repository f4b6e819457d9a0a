"""Requests to a loaded vLLM and their results, in terms that do not depend on its version."""

from dataclasses import dataclass
from typing import Protocol

from gateway.backends.host import EngineFacts
from gateway.backends.port import Completion, DeltaSink, Work
from gateway.contracts.values import ResponseFormat, Sampling


@dataclass(frozen=True, slots=True)
class Lora:
    """A loaded adapter: the name that metrics show, vLLM's integer for these weights, and their folder."""

    name: str
    number: int
    path: str

    @property
    def key(self) -> str:
        """The name given to vLLM: unique to these weights, since it is part of the key of cached blocks."""
        return f"{self.name}#{self.number}"


def name_of(key: str) -> str:
    """The adapter's name out of :attr:`Lora.key`."""
    return key.rpartition("#")[0]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request to the engine.

    ``sampling`` has all fields set: defaults are filled in. ``priority`` is the gateway's: higher first.
    The last ``partial_tokens`` of ``token_ids`` are not prompt but the partial answer, whose delivered
    text is ``partial_text``; with ``None`` all its events are delivered again.
    ``chat`` is the work of a conversation: its answer may have reasoning and tool calls.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    response_format: ResponseFormat
    priority: int = 0
    cache_salt: str | None = None
    lora: Lora | None = None
    partial_tokens: int = 0
    partial_text: str | None = ""
    chat: Work | None = None

    @property
    def prompt_tokens(self) -> int:
        """The planned length of the prompt, in tokens, with the partial answer and the images."""
        return len(self.token_ids) + (self.chat.image_tokens if self.chat is not None else 0)


@dataclass(frozen=True, slots=True)
class EngineShape(EngineFacts):
    """The limits of a loaded vLLM; ``pools``: it makes vectors and does not generate."""

    max_num_seqs: int = 0
    max_loras: int = 0
    takes_images: bool = False
    pools: bool = False


class LoadedEngine(Protocol):
    """A running vLLM."""

    @property
    def shape(self) -> EngineShape:
        """The limits of the loaded engine."""

    @property
    def dead(self) -> bool:
        """Whether its core has ended by itself."""

    @property
    def unfinished(self) -> int:
        """Requests that it has accepted and not ended."""

    @property
    def pending_tokens(self) -> int:
        """Most prompt tokens that its current step may compute."""

    @property
    def occupied(self) -> bool:
        """Whether its core executes a call other than generation."""

    async def run(self, ask: EngineRequest, out: DeltaSink) -> Completion:
        """Generate; cancelling aborts the request. Raises BackendFailure."""

    async def embed(self, request_id: str, token_ids: tuple[int, ...], dimensions: int | None) -> str:
        """A vector in the form of :class:`gateway.backends.port.Vectors`; for the pooling runner alone.

        Cancelling aborts the request. Raises BackendFailure.
        """

    async def add_lora(self, lora: Lora) -> None:
        """Load a further adapter. Raises EngineError; nothing has changed then."""

    async def remove_lora(self, number: int) -> None:
        """Unload an adapter; one that vLLM has dropped already is no error."""

    async def pin_lora(self, number: int) -> None:
        """Keep a loaded adapter in a place of the batch until it is removed. Raises EngineError."""

    def give_up(self) -> None:
        """Fail all calls that wait for the core, which has ended or is about to. On the event loop."""

    def shutdown(self, timeout_s: float) -> None:
        """End the core, by force after ``timeout_s``. Blocks; not for the event loop."""
