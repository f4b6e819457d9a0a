"""Fixtures: one specimen of each backend for the whole session, and the reference answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import pytest_asyncio

from budgeting.values import Message, Role
from engine.build import build_engine
from engine.values import EngineConfig, GenerationRequest
from gateway.contracts.features import Feature
from tests.conformance.bedrock import bedrock
from tests.conformance.harness import DEMO_MODEL, Specimen, demo_tokenizer, in_one_task
from tests.conformance.specimens import HAS_VLLM, embedded, scripted, sluice_worker, vllm_worker
from tests.engine.support import greedy, reference_greedy, run_to_end
from tests.ray.replicas import ray_replica

# Starting vLLM takes half a minute on a quiet machine.
SLOW = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed (its CPU build needs Linux on x86-64)"),
]
# The cheap ones are one group: the reference answers are computed once in each test process.
PARAMS = [
    pytest.param("scripted", marks=pytest.mark.xdist_group("conformance")),
    pytest.param("embedded", marks=pytest.mark.xdist_group("conformance")),
    pytest.param("ray-replica", marks=pytest.mark.xdist_group("conformance")),
    pytest.param("bedrock", marks=pytest.mark.xdist_group("conformance")),
    pytest.param("sluice-worker", marks=pytest.mark.xdist_group("conformance")),
    pytest.param("vllm-worker-messages", marks=[pytest.mark.xdist_group("conformance-vllm-worker"), *SLOW]),
    pytest.param("vllm-worker-token-ids", marks=[pytest.mark.xdist_group("conformance-vllm-worker"), *SLOW]),
    pytest.param("vllm-in-process", marks=[pytest.mark.xdist_group("vllm"), *SLOW]),
]

QUESTIONS = (
    "Which volume comes next?",
    "How long does shipping take?",
    "Tell me about a manga with a dragon.",
)
END_TOKEN = 2
LONG_QUESTION = "Tell me about a manga with a dragon, at length."
PENALIZED_TOKENS = 24
PENALTIES = {
    Feature.PRESENCE_PENALTY: 2.0,
    Feature.FREQUENCY_PENALTY: 2.0,
    Feature.REPETITION_PENALTY: 2.0,
}


@pytest.fixture(scope="session", params=PARAMS)
def started(
    request: pytest.FixtureRequest, workshop: Path
) -> Specimen | AbstractAsyncContextManager[Specimen]:
    """Each backend in turn: a running specimen that other tests share, or the context manager that starts one."""
    match request.param:
        case "scripted":
            return scripted(workshop)
        case "embedded":
            return embedded(workshop)
        case "ray-replica":
            return ray_replica(workshop)
        case "bedrock":
            return bedrock(workshop)
        case "sluice-worker":
            return sluice_worker(workshop)
        case "vllm-in-process":
            shared: Specimen = request.getfixturevalue("vllm")
            return shared
    # "auto" sends ids, since the worker's tokenizer and chat template are the same as the gateway's.
    prompt = "auto" if request.param.endswith("token-ids") else "messages"
    return vllm_worker(workshop, request.getfixturevalue("vllm_server"), prompt)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def specimen(started: Specimen | AbstractAsyncContextManager[Specimen]) -> AsyncIterator[Specimen]:
    """Each backend in turn, running."""
    if isinstance(started, Specimen):
        yield started
        return
    async with in_one_task(started) as running:
        yield running


@pytest.fixture(scope="session")
def reference() -> dict[str, str]:
    """The model's greedy answer of 24 tokens to each question, as Transformers computes it in float32."""
    answers = reference_greedy(DEMO_MODEL, [chat(question) for question in QUESTIONS], 24)
    return {question: said(answer) for question, answer in zip(QUESTIONS, answers, strict=True)}


@pytest.fixture(scope="session")
def penalized() -> dict[str, str]:
    """The model's answer under each penalty, by its name, from the embedded engine, whose own tests prove it."""
    engine = build_engine(EngineConfig(str(DEMO_MODEL), num_threads=1, num_blocks=128, seed=0))
    asked = {"none": {}, **{feature.value: {feature.value: value} for feature, value in PENALTIES.items()}}
    requests = [
        GenerationRequest(
            name,
            chat(LONG_QUESTION),
            greedy(PENALIZED_TOKENS, logit_bias=((END_TOKEN, -100.0),), **options),
        )
        for name, options in asked.items()
    ]
    return {name: said(answer.token_ids) for name, answer in run_to_end(engine, requests).items()}


def chat(question: str) -> tuple[int, ...]:
    return demo_tokenizer().encode_chat([Message(Role.USER, question)])


def said(token_ids: Sequence[int]) -> str:
    """Decode an answer, without the token that ends it."""
    return demo_tokenizer().decode([token for token in token_ids if token > END_TOKEN])
