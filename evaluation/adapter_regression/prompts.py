"""The prompt set: conversations that end with the user, each with what a good answer must contain."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from gateway.config.section import Pattern, Section

MAX_FILE_BYTES = 16 << 20
MAX_PROMPTS = 5_000


class PromptSetError(Exception):
    """The prompt set cannot be read; the message names the file, the line and the fault."""


_Pattern = Annotated[Pattern, Field(min_length=1, max_length=1_000)]


class PromptMessage(Section):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class Case(Section):
    """One prompt.

    Args:
        id: unique in its set; a report names prompts by it.
        group: its topic, by which results are grouped.
        language: ``en`` or ``ja``: the required language of the answer.
        messages: the conversation; the last message is the user's.
        reference: a good answer, for loss, similarity and exact match.
        expect: pattern that a right answer matches, ignoring case.
        format: patterns, all of which the answer must match.
        refuse: whether the right answer declines.
    """

    id: Annotated[str, Field(min_length=1, max_length=100)]
    group: Annotated[str, Field(min_length=1, max_length=100)]
    language: Literal["en", "ja"] = "en"
    messages: Annotated[tuple[PromptMessage, ...], Field(min_length=1)]
    reference: Annotated[str, Field(min_length=1)] | None = None
    expect: _Pattern | None = None
    format: tuple[_Pattern, ...] = ()
    refuse: bool = False

    @model_validator(mode="after")
    def _ends_with_the_user(self) -> Case:
        if self.messages[-1].role != "user":
            raise ValueError("messages must end with one of the user's")
        return self


@dataclass(frozen=True, slots=True)
class PromptSet:
    """A file of prompts and the SHA-256 of its bytes."""

    name: str
    sha256: str
    cases: tuple[Case, ...]


def load_prompts(path: Path) -> PromptSet:
    """Read a JSONL file, one case per line. Raises PromptSetError."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise PromptSetError(f"{path}: {size:,} bytes; allowed: at most {MAX_FILE_BYTES:,}")
        raw = path.read_bytes()
        lines = raw.decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PromptSetError(f"{path}: cannot be read: {error}") from None
    cases: dict[str, Case] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            case = Case.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the line"
            raise PromptSetError(f"{path}: line {number}: {where}: {first['msg']}") from None
        if case.id in cases:
            raise PromptSetError(f"{path}: line {number}: id {case.id!r} stands there twice")
        cases[case.id] = case
    if not 1 <= len(cases) <= MAX_PROMPTS:
        raise PromptSetError(f"{path}: {len(cases)} prompts; allowed: 1 to {MAX_PROMPTS:,}")
    return PromptSet(path.name, hashlib.sha256(raw).hexdigest(), tuple(cases.values()))
