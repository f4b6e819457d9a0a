"""Values, without Ray: messages between replicas, a replica's resources, and the wanted number of replicas."""

from __future__ import annotations

from types import MappingProxyType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.values import Adapter
from budgeting.values import ImageContent, Message, Role, Tool, ToolCall, ToolChoice
from gateway.backends.port import Completion, PartialAnswer, Work
from gateway.backends.workers.worker_choice import WorkerChoice, WorkerPreference, WorkerView
from gateway.config.engine import EngineSection
from gateway.config.ray import RaySection
from gateway.contracts.events import Delta, Reasoning, ToolArgs, ToolBegin, ToolEnd
from gateway.contracts.images import ImageData
from gateway.contracts.values import (
    FinishReason,
    FormatType,
    ResponseFormat,
    Sampling,
    TokenLogprob,
    Usage,
)
from ops.ray.flow import UNWATCHED_DELTAS, Flow
from ops.ray.placement import placement_of
from ops.ray.scaling import QueueAndMemory
from ops.ray.wire import Failed, ReplicaPiece, RouterHint, decode_hint, decode_piece, decode_work, encode
from resilience.failures import BackendFailure, FailureKind


def test_work_arrives_as_it_was_sent() -> None:
    work = Work(
        "gen_1",
        (1, 2, 3),
        (
            Message(Role.USER, "Grüße\n漫画", parts=("Grüße", ImageContent("data:,x"))),
            Message(Role.ASSISTANT, "", (ToolCall("c", "stock", "{}"),)),
        ),
        Sampling(max_tokens=4, stop=("\n",), logit_bias=MappingProxyType({5: -1.5})),
        ResponseFormat(FormatType.REGEX, "[a-z]+"),
        Adapter("manga_v3", 3, "demo", "/adapters/manga_v3", MappingProxyType({"domain": "manga"})),
        priority=1,
        cache_salt="acme",
        prefix_tokens=2,
        stream=False,
        partial=PartialAnswer("Hel", (9, 8)),
        tools=(Tool("stock", parameters='{"type":"object"}'),),
        tool_choice=ToolChoice(name="stock"),
        template_kwargs={"enable_thinking": False},
        images={"a": ImageData("image/png", memoryview(b"\x89PNG"))},
    )
    assert decode_work(encode(work)) == work


def test_an_answer_arrives_as_it_was_sent() -> None:
    top = (TokenLogprob(b"\xe6", -0.5),)
    piece = ReplicaPiece(
        "replica-1",
        (Delta("a", 1, 3, 0.25, 0, (TokenLogprob(b"a", -0.1, top),), (7,)), Delta("", 1, index=1)),
        Completion(FinishReason.STOP, Usage(3, 2, 1), 0.5, (FinishReason.LENGTH,)),
    )
    assert decode_piece(encode(piece)) == piece


@given(
    st.sampled_from(FailureKind),
    st.text(),
    st.none() | st.floats(0, 100),
    st.none() | st.text(),
    st.booleans(),
)
def test_a_failure_arrives_as_it_was_raised(
    kind: FailureKind, message: str, retry_after_s: float | None, param: str | None, final: bool
) -> None:
    raised = BackendFailure(kind, message, retry_after_s=retry_after_s, param=param, no_retry_here=final)
    failed = decode_piece(encode(ReplicaPiece(failed=Failed.of(raised)))).failed
    assert failed is not None
    failure = failed.failure()
    assert (failure.kind, str(failure), failure.retry_after_s, failure.param, failure.no_retry_here) == (
        kind,
        message,
        retry_after_s,
        param,
        final,
    )


def test_a_route_arrives_as_it_was_sent() -> None:
    route = RouterHint((2**63 - 1, -(2**63)), 1, "manga_v3", ("a",))
    assert decode_hint(encode(route)) == route


async def test_a_stream_gives_at_once_what_is_ready() -> None:
    flow = Flow(watched=True)
    await flow.push(Delta("a", 1))
    await flow.push(Delta("b", 1))
    assert [delta.text for delta in (await flow.take()).deltas] == ["a", "b"]
    await flow.push(Delta("c", 1))
    flow.end(Completion(FinishReason.STOP, Usage(1, 3)))
    last = await flow.take()
    assert [delta.text for delta in last.deltas] == ["c"]
    assert last.completion is not None
    assert flow.ended


async def test_an_unwatched_answer_comes_in_larger_pieces_after_the_first() -> None:
    flow = Flow(watched=False)
    await flow.push(Delta("a", 1))
    assert len((await flow.take()).deltas) == 1
    for _ in range(UNWATCHED_DELTAS):
        await flow.push(Delta("b", 1))
    assert len((await flow.take()).deltas) == UNWATCHED_DELTAS


def engine(**keys: object) -> EngineSection:
    return EngineSection.model_validate({"kind": "vllm", **keys})


def test_an_engine_takes_one_gpu_and_on_a_cpu_none() -> None:
    embedded = EngineSection()
    assert placement_of(embedded, num_cpus=2, num_gpus=None) == {
        "ray_actor_options": {"num_cpus": 2, "num_gpus": 1}
    }
    on_cpu = EngineSection(device="cpu")
    assert placement_of(on_cpu, num_cpus=1, num_gpus=None)["ray_actor_options"]["num_gpus"] == 0
    assert placement_of(engine(), num_cpus=1, num_gpus=0)["ray_actor_options"]["num_gpus"] == 0


def test_tensor_parallel_on_one_node_is_one_actor_with_its_gpus() -> None:
    placed = placement_of(engine(tensor_parallel_size=4), num_cpus=8, num_gpus=None)
    assert placed == {"ray_actor_options": {"num_cpus": 8, "num_gpus": 4}}


def test_ranks_over_ray_have_a_bundle_each_and_tensor_ranks_stay_on_one_node() -> None:
    section = engine(tensor_parallel_size=4, distributed_executor_backend="ray")
    options = placement_of(section, num_cpus=2, num_gpus=None)
    assert options == {
        "ray_actor_options": {"num_cpus": 2, "num_gpus": 0},
        "placement_group_bundles": [{"CPU": 2, "GPU": 1}, {"GPU": 1}, {"GPU": 1}, {"GPU": 1}],
        "placement_group_strategy": "STRICT_PACK",
    }


def test_pipeline_stages_may_lie_on_several_nodes() -> None:
    section = engine(tensor_parallel_size=8, pipeline_parallel_size=2, distributed_executor_backend="ray")
    placed = placement_of(section, num_cpus=1, num_gpus=None)
    assert len(placed["placement_group_bundles"]) == 16
    assert placed["placement_group_strategy"] == "PACK"


def test_a_maximum_of_engines_below_the_minimum_is_refused() -> None:
    with pytest.raises(ValueError, match=r"engines_max: 1 is less than engines_min \(2\)"):
        RaySection(engines_min=2, engines_max=1)


def wanted(metrics: dict[str, dict[str, float]] | None, target_sequences: float, target_kv: float) -> float:
    context = SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=3)
    return QueueAndMemory(target_sequences, target_kv)(context)[0]


def figures(running: float, queued: float, kv_usage: float) -> dict[str, dict[str, float]]:
    return {"running": {"a": running}, "queued": {"a": queued}, "kv_usage": {"a": kv_usage}}


def test_the_queue_in_the_gateways_counts_as_load_on_the_engines() -> None:
    assert wanted(figures(0, 0, 0.0), target_sequences=8, target_kv=0.9) == 0
    assert wanted(figures(8, 24, 0.1), target_sequences=8, target_kv=0.9) == 4


def test_full_memory_asks_for_replicas_though_few_sequences_run() -> None:
    assert wanted(figures(4, 0, 1.9), target_sequences=8, target_kv=0.9) > 2


def test_every_gateways_queue_is_counted_once_however_many_replicas_heard_of_it() -> None:
    metrics = {
        "running": {"a": 4.0, "b": 2.0},
        "waiting": {"a": 1.0, "b": 0.0},
        "kv_usage": {"a": 0.5, "b": 0.25},
        "queued": {"a": 6.0, "b": 5.0},
    }
    assert wanted(metrics, target_sequences=13, target_kv=0.9) == 1.0
    assert wanted(metrics, target_sequences=100, target_kv=0.75) == 1.0


def test_without_figures_the_replicas_stay() -> None:
    assert wanted(None, 8, 0.9) == 3


def test_a_choice_remembers_what_replicas_that_stay_were_sent() -> None:
    choice = WorkerChoice(["a"])
    preference = WorkerPreference((11, 12, 13), 1)
    choice.sent("a", preference)
    choice.resize(["a", "b", "c"])
    views = [WorkerView("c"), WorkerView("b"), WorkerView("a")]
    assert choice.choose(preference, views) == "a"
    choice.resize(["b", "c"])
    assert choice.choose(preference, views[:2]) in ("b", "c")
    choice.resize(["a", "b", "c"])
    assert choice.choose(WorkerPreference((11, 99), 1), views[:1]) == "c"


def test_the_kind_of_every_event_survives_the_wire() -> None:
    sent = (
        Delta("a", 1),
        Reasoning("b", 1),
        ToolBegin("stock", 1, call=0, id="c"),
        ToolArgs("{}", 1, call=0),
        ToolEnd("", 0, call=0),
    )
    read = decode_piece(encode(ReplicaPiece(deltas=sent))).deltas
    assert read == sent
    assert [type(one) for one in read] == [type(one) for one in sent]
