"""The section ``shadow``."""

from typing import Annotated

from pydantic import Field

from gateway.config.section import Pattern, Section


class JudgeConfig(Section):
    """A model that decides which of two answers is better; each judged pair costs one more request."""

    backend: str
    sample: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_tokens: Annotated[int, Field(ge=1, le=4_096)] = 64


class ShadowSection(Section):
    """Mirrored requests and what is stored of them; docs/shadow.md explains each key."""

    queue: Annotated[int, Field(ge=1, le=100_000)] = 200
    queue_bytes: Annotated[int, Field(ge=1)] = 16 << 20
    concurrency: Annotated[int, Field(ge=1, le=1_000)] = 2
    max_spend_usd_per_minute: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    deadline_seconds: Annotated[float, Field(gt=0, le=3_600)] = 60.0
    idle_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    redact: Annotated[str, Field(min_length=1)] = "pii"
    keep_texts: bool = False
    keep_pairs: Annotated[int, Field(ge=1, le=10_000_000)] = 20_000
    keep_days: Annotated[float, Field(gt=0, le=3_650)] = 30.0
    checks: Annotated[tuple[str, ...], Field(max_length=32)] = (
        "shape", "language", "grounding", "forbidden", "pii", "no_refusal",
    )  # fmt: skip
    forbidden: Annotated[tuple[Pattern, ...], Field(max_length=256)] = ()
    judge: JudgeConfig | None = None
