"""What the journey and the edge need of the shadow."""

from __future__ import annotations

from typing import Protocol

from gateway.contracts.values import Answer
from gateway.generation.dispatcher import GenerationOutcome
from gateway.generation.job import Job


class Mirrors(Protocol):
    """Takes copies of answered requests."""

    def mirror(self, job: Job, outcome: GenerationOutcome, answer: Answer) -> None:
        """Take a copy, or not; waits for nothing and raises nothing."""


class NoShadow:
    """Takes none."""

    def mirror(self, job: Job, outcome: GenerationOutcome, answer: Answer) -> None:
        """Nothing."""
