"""Values of accounting: usage rows, one per generation, and token counts of engines."""

from dataclasses import dataclass
from typing import Literal, Self

import msgspec
from msgspec.structs import replace

HOUR_S = 3600
DAY_S = 24 * HOUR_S

# ``front``: a request of another Sluice, which bills its own tenant. ``cache``: embeddings of questions for
# the response cache.
Kind = Literal["request", "shadow", "front", "cache"]


class UsageRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """The usage of one generation, the unit of billing. To change a row, use ``msgspec.structs.replace``.

    ``started_at`` is Unix time in seconds. ``fallback`` is the fallback target that answered, if the intended
    backend did not. ``input_tokens``, ``output_tokens``, ``cached_tokens`` and ``cache_write_tokens`` (parts
    of the input) and ``reasoning_tokens`` (a part of the output) are what the engine counted, and
    ``cost_nanousd`` (10⁻⁹ US dollars, by ``price_version`` of the price book) is their cost to the operator.
    The ``billable`` tokens are billed to the tenant: zero for an undelivered answer and for every kind other
    than ``request``.
    """

    # A struct, because a row is created or changed some four times per request, and each time takes 5 to
    # 20 µs with a dataclass of as many fields.

    generation_id: str
    request_id: str
    tenant: str
    key_id: str
    contract: str
    route: str
    started_at: float
    kind: Kind = "request"
    org: str | None = None
    user_id: str | None = None
    intent: str | None = None
    session_id: str | None = None
    adapter_id: str | None = None
    prompt_version: str | None = None
    revision: int | None = None
    backend: str | None = None
    backend_name: str | None = None
    backend_version: str | None = None
    model: str | None = None
    trace_id: str | None = None
    finish_reason: str = "error"
    error_code: str | None = None
    fallback: str | None = None
    fallback_reason: str | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    cache_write_tokens: int = 0
    tool_calls: int = 0
    billable_input_tokens: int = 0
    billable_output_tokens: int = 0
    billable_cached_tokens: int = 0
    cost_nanousd: int = 0
    price_version: str | None = None
    queue_wait_ms: float = 0.0
    ttft_ms: float | None = None
    total_ms: float = 0.0

    @property
    def hour(self) -> int:
        """Hours from 1970 to the start; rows are partitioned and summed up by it."""
        return int(self.started_at // HOUR_S)

    def delivered(self) -> Self:
        """The row with all its tokens billable, if it is a request's."""
        if self.kind != "request":
            return self
        return replace(
            self,
            billable_input_tokens=self.input_tokens,
            billable_output_tokens=self.output_tokens,
            billable_cached_tokens=self.cached_tokens,
        )


@dataclass(frozen=True, slots=True)
class PartialUsage:
    """The usage of an interrupted generation; ``delivered``: the tenant has received a part of the answer."""

    row: UsageRow
    delivered: bool


@dataclass(frozen=True, slots=True)
class EngineCount:
    """Tokens that one engine counted within an hour (``hour``: hours since 1970), as observed by the process
    ``observer`` for ``covered_s`` of the 3,600 seconds.
    """

    hour: int
    backend: str
    engine: str
    observer: str
    prompt_tokens: int = 0
    generation_tokens: int = 0
    covered_s: float = 0.0
