"""One request in the engine: its known and computed tokens, and its resources.

    token_ids:  [ prompt ............ | output ...... ]      the output may begin with a partial answer
                [ computed ...... | pending ......... ]      computed tokens have keys and values in blocks

There is no prefill or decode state: of a new prompt many tokens are pending, of a running answer one, of a
preempted sequence all. When the last known token has been computed, the next one can be sampled.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.values import GenerationRequest

if TYPE_CHECKING:  # the scheduler imports this module, and must not import torch
    import torch

    from engine.penalties import Adjustments
    from engine.structured import Matcher


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """One set of LoRA weights. ``number`` counts the loads of this engine, so a replacement with the same id
    is another version, with other keys and values.
    """

    adapter_id: str
    number: int


@dataclass(slots=True, eq=False)
class Sequence:
    """A request and its state. Times are the engine's clock, in seconds; ``row`` is its block table row, -1
    while it does not run. It has blocks only while it runs.

    ``num_cached`` is the number of prompt tokens from the prefix cache; ``rank`` orders sequences, the most
    important first; ``digests`` are the identities of the first blocks, as far as they were needed.
    ``adjustments`` and ``matcher`` depend on the output only, so a preemption does not change them.
    ``hidden_sum`` is the sum of the hidden states of the computed tokens of a text to embed.
    """

    request: GenerationRequest
    arrived_at: float
    seed: int
    adapter: AdapterVersion | None = None
    token_ids: list[int] = field(init=False)
    num_computed: int = 0
    num_cached: int = 0
    blocks: list[int] = field(default_factory=list)
    row: int = -1
    rank: tuple[float, int] = (0.0, 0)
    preemptions: int = 0
    digests: list[bytes] = field(default_factory=list)
    first_scheduled_at: float | None = None
    adjustments: "Adjustments | None" = None
    matcher: "Matcher | None" = None
    hidden_sum: "torch.Tensor | None" = None

    def __post_init__(self) -> None:
        self.token_ids = [*self.request.prompt_token_ids, *self.request.partial_token_ids]

    @property
    def is_running(self) -> bool:
        return self.row >= 0

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Number of known tokens: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        """Number of output tokens: those of the partial answer, and those sampled in this call."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_sampled(self) -> int:
        """Number of tokens sampled in this call, without those of the partial answer."""
        return self.num_output - len(self.request.partial_token_ids)

    @property
    def num_pending(self) -> int:
        """Number of known tokens that are not computed."""
        return len(self.token_ids) - self.num_computed

    @property
    def queue_wait_s(self) -> float | None:
        """Seconds from arrival to the first scheduling; None before it."""
        return None if self.first_scheduled_at is None else self.first_scheduled_at - self.arrived_at
