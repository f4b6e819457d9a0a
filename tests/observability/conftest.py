from collections.abc import Callable

import pytest
from msgspec.structs import replace

from observability.events import RequestRecord

RECORD = RequestRecord(
    request_id="req_9f1b",
    generation_id="gen_1",
    trace_id="4bf92f3577b34da6a3ce929d0e0e4736",
    tenant="shop",
    contract="native",
    status=200,
    total_ms=912.4,
    route="self_hosted_generation",
    model="llama-8b-awq",
    intent="manga_recommendation",
    locale="ja",
    adapter_id="manga_domain_v3",
    adapter_rule="rule[1]",
    prompt_version="chat-manga-2.1",
    revision=7,
    backend="embedded",
    backend_name="local",
    backend_version="llama-8b-awq+manga_domain_v3",
    finish_reason="stop",
    input_tokens=842,
    output_tokens=137,
    cached_tokens=640,
    queue_wait_ms=3.1,
    ttft_ms=88.0,
    generation_ms=900.0,
    overhead_ms=1.2,
    stage_ms={"plan": 0.4, "admit": 3.2, "generate": 900.0, "account": 0.1},
    dropped_chunks=1,
    dropped_turns=2,
    stream=True,
)


@pytest.fixture
def record() -> Callable[..., RequestRecord]:
    """A function that makes the record of a finished request; keywords replace its fields."""

    def make(**changes: object) -> RequestRecord:
        return replace(RECORD, **changes)

    return make
