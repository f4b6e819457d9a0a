"""A trace's attributes: the names of OpenTelemetry's GenAI semantic conventions of August 2026, and
``sluice.*`` for the others. ``trace_build`` adds prompt and answer for routes that opted in.
"""

from collections.abc import Mapping
from types import MappingProxyType
from urllib.parse import urlsplit

from observability.events import RequestRecord
from observability.trace_facts import EdgeRecord, TraceFacts
from observability.trace_steps import CallSpan, TraceStep

Value = str | bool | int | float | tuple[str, ...]
# By name; those that are ``None`` are not known, and left out of the span.
Attributes = dict[str, Value | None]

# The conventions' provider names that differ from our backend kinds. The conventions prescribe ``openai`` for
# any unidentified service with OpenAI's protocol.
PROVIDERS: Mapping[str, str] = MappingProxyType({"bedrock": "aws.bedrock"})


# Fields of a request's record that a trace shows under their own names.
OWN_NAMES = (
    "request_id", "tenant", "contract", "route", "intent", "locale", "adapter_rule", "prompt_version",
    "revision", "backend", "backend_name", "backend_version", "cached_tokens", "priority", "queue_wait_ms",
    "ttft_ms", "generation_ms", "overhead_ms", "total_ms",
)  # fmt: skip


# The conventions' names of operations by contract; all other contracts are chats.
OPERATIONS: Mapping[str, str] = MappingProxyType(
    {
        "completions": "text_completion",
        "embeddings": "embeddings",
        # The conventions have no names for these.
        "rerank": "rerank",
        "audio": "audio",
    }
)


def operation(record: RequestRecord) -> str:
    """The operation's name in the conventions."""
    return OPERATIONS.get(record.contract, "chat")


def span_name(record: RequestRecord) -> str:
    """The span's name by the conventions: the operation, and the model unless it is unknown."""
    known = record.model is not None and record.route is not None
    return f"{operation(record)} {record.model}" if known else operation(record)


def attributes(record: RequestRecord) -> Attributes:
    """The root span's attributes."""
    backend = record.backend
    found: Attributes = {
        "gen_ai.operation.name": operation(record),
        "gen_ai.provider.name": PROVIDERS.get(backend, backend) if backend else None,
        "gen_ai.request.model": record.model,
        "gen_ai.request.stream": record.stream,
        "gen_ai.response.id": record.generation_id or None,
        "gen_ai.response.model": record.backend_version,
        "gen_ai.response.finish_reasons": (record.finish_reason,) if record.finish_reason else None,
        "gen_ai.response.time_to_first_chunk": None if record.ttft_ms is None else record.ttft_ms / 1000,
        "gen_ai.usage.input_tokens": record.input_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "error.type": record.error_code,
        "http.response.status_code": record.status,
        "sluice.adapter": record.adapter_id,
        "sluice.prefix_cache_hit": record.cached_tokens > 0,
        "sluice.prefix.fingerprint": record.prefix_fingerprint,
        "sluice.prefix.tokens": record.prefix_tokens,
        "sluice.prefix.expected_tokens": record.prefix_expected_tokens,
        "sluice.prefix.cached_tokens": record.prefix_cached_tokens,
        "sluice.prompt.volatile": record.volatile,
        "sluice.prompt.volatile_action": record.volatile_action,
        "sluice.fallback.kind": record.fallback_kind,
        "sluice.fallback.reason": record.fallback_reason,
        "sluice.seams": len(record.seams) if record.seams else None,
        "sluice.budget.dropped_chunks": record.dropped_chunks,
        "sluice.budget.dropped_turns": record.dropped_turns,
        "sluice.budget.cut_chunks": record.cut_chunks or None,
        "sluice.budget.merged_chunks": record.merged_chunks or None,
        "sluice.budget.summarized_turns": record.summarized_turns or None,
    }
    return found | {f"sluice.{name}": getattr(record, name) for name in OWN_NAMES}


def fact_attributes(facts: TraceFacts) -> Attributes:
    """The root span's attributes that the record lacks; the finish reasons of several choices replace that
    of the first.
    """
    several = {"gen_ai.response.finish_reasons": facts.finish_reasons} if facts.finish_reasons else {}
    return {
        **several,
        **{f"gen_ai.request.{name}": value for name, value in facts.sampling.items()},
        "gen_ai.request.choice.count": facts.choices if facts.choices != 1 else None,
        "sluice.admission.decision": facts.admission,
        "sluice.admission.reason": facts.admission_reason,
        "sluice.attempts": sum(step.name == "attempt" for step in facts.steps) or None,
    }


def step_attributes(record: RequestRecord, step: TraceStep) -> Attributes:
    """A step's attributes; an attempt calls a model, so it also has attributes of the conventions."""
    attempted = step.name == "attempt"
    found: Attributes = {
        "sluice.backend_name": step.backend,
        "sluice.step": step.name,
        "sluice.attempt.number": step.attempt,
        "sluice.step.mode": step.mode,
        "sluice.attempt.waited_ms": step.waited_ms,
        "error.type": step.failure,
    }
    if attempted:
        found["gen_ai.operation.name"] = operation(record)
        found["gen_ai.request.model"] = record.model
        if record.backend is not None and step.backend == record.backend_name:
            found["gen_ai.provider.name"] = PROVIDERS.get(record.backend, record.backend)
    return found


def call_attributes(call: CallSpan) -> Attributes:
    """A call's attributes: the server, and whether it was a hedge."""
    parts = urlsplit(call.target)
    return {
        "server.address": parts.hostname or call.target,
        "server.port": parts.port,
        "sluice.hedge": call.hedge or None,
        "error.type": call.failure,
    }


def edge_attributes(record: EdgeRecord) -> Attributes:
    """Attributes of an answer without a generation: those of HTTP."""
    return {
        "http.request.method": record.method,
        "http.route": record.path,
        "http.response.status_code": record.status,
        "error.type": record.error_code,
        "sluice.request_id": record.request_id,
    }
