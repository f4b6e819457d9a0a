"""A request at the gate, from its offer to its release."""

from dataclasses import dataclass
from enum import StrEnum

from admission.fair_queue import Waiting
from admission.forecast import ReservedTokens
from admission.values import Demand, Reason


class Hold(StrEnum):
    """What keeps the next queued request from being handed on."""

    SLOTS = "slots"
    PREFILL = "prefill"
    MEMORY = "memory"


# Why a request was handed on although with it the forecast passes the watermark: nothing runs that could give
# memory back, so waiting would not help.
IDLE_ENGINE = "idle_engine"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request was refused, and when a retry makes sense.

    ``first_token_s``: when its first token was expected, if the request was refused because of that alone.
    """

    reason: Reason
    estimated_wait_s: float
    retry_after_s: float
    queued: bool = False
    first_token_s: float | None = None


class TicketState(StrEnum):
    """A request's state at the gate."""

    WAITING = "waiting"
    HANDED_ON = "handed_on"
    GONE = "gone"


# For code that every request runs: the lookup of an enum's member costs more than a call (Python 3.11).
WAITING, HANDED_ON, GONE = TicketState


class AdmissionTicket(Waiting, kw_only=True):
    """One request at the gate; ``number`` is its id there.

    ``max_tokens`` is the bound after the degradation ladder, all its sequences together; ``reserved`` the
    memory that it will need; ``alone`` whether it was handed to an idle backend; ``beyond`` why it was handed
    on although with it the memory forecast passes its watermark.
    """

    demand: Demand
    reserved: ReservedTokens
    max_tokens: int
    max_wait_s: float
    estimated_wait_s: float
    estimated_first_token_s: float
    state: TicketState = TicketState.WAITING
    handed_on_at: float = 0.0
    first_token_at: float | None = None
    ahead_at_hand_over: int = 0
    alone: bool = False
    beyond: str | None = None
    shrunk: bool = False  # whether the ladder shortened its answer
    refusal: Refusal | None = None
    cached_tokens: int | None = None  # as reported with the first token
    cached_at_end: int | None = None  # as reported with the last token, where the first had no report
