"""OpenAI's batches: the body that creates one, and the objects that clients read."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NotRequired

from pydantic import Field, field_validator
from typing_extensions import TypedDict

from gateway.contracts.fields import Body, Label, Metadata
from gateway.contracts.openai_answer import PageBody

_WINDOW: Final = re.compile(r"([1-9]\d{0,3})([mhd])")
_SECONDS: Final = {"m": 60, "h": 3_600, "d": 86_400}
MAX_WINDOW_S: Final = 30 * 86_400


class ExpiresAfter(Body):
    """When the result files expire."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3_600, le=2_592_000)]


class BatchBody(Body):
    """The body of ``POST /v1/batches``."""

    input_file_id: Label
    endpoint: Literal[
        "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/generate"
    ]
    completion_window: str
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None

    @field_validator("completion_window")
    @classmethod
    def _is_a_time(cls, value: str) -> str:
        if window_s(value) is None:
            raise ValueError("allowed: minutes, hours or days up to 30d, e.g. 24h")
        return value


def window_s(window: str) -> float | None:
    """The seconds of a window such as ``24h``; ``None`` if it is not valid."""
    found = _WINDOW.fullmatch(window)
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
    return float(seconds) if 0 < seconds <= MAX_WINDOW_S else None


class FileBody(TypedDict):
    """OpenAI's file object."""

    id: str
    object: str
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: str
    status_details: str | None


class FilesBody(PageBody):
    """A page of files."""

    data: list[FileBody]


class RequestCounts(TypedDict):
    """How many lines of a batch are completed and failed."""

    total: int
    completed: int
    failed: int


class BatchObject(TypedDict):
    """OpenAI's batch object; times are Unix seconds."""

    id: str
    object: str
    endpoint: str
    model: str | None
    errors: dict[str, Any] | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: NotRequired[Mapping[str, Any]]
    metadata: dict[str, str] | None


class BatchesBody(PageBody):
    """A page of batches."""

    data: list[BatchObject]
