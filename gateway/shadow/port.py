"""What the journey needs of the shadow."""

from __future__ import annotations

from typing import Protocol

from gateway.contracts.values import Answer
from gateway.generation.dispatcher import GenerationOutcome
from gateway.generation.job import Job


class Mirrors(Protocol):
    """Copies answered requests."""

    def mirror(self, job: Job, outcome: GenerationOutcome, answer: Answer) -> None:
        """Copy the request, or not; waits for nothing and raises nothing."""


class NoShadow:
    """No shadow."""

    def mirror(self, job: Job, outcome: GenerationOutcome, answer: Answer) -> None:
        """Ignore the request."""
